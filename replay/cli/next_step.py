"""Closing line of a replay: the suggested next step, with a command to paste."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from attention_replay.errors import Error
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from replay.api.plan_model import BUDGET
from replay.api.recorded_models import whole_captures
from replay.cli.shared_options import OPTIONS, SHAPE, VALUES
from replay.end_to_end.rebuild import load_arguments
from replay.plan.plan import Plan
from replay.report.matrix import BUSY, Matrix, matrix
from replay.rows.row import Row, Speedup

OF_RECORDING = ("--dir", "--kernels", "--device", "--env", "--timeout", "--tolerances")
"""Options that `plan` and `verify` share with the default verb."""

CARRIED = (
    *("--dir", "--join-ranks", *SHAPE, "--max-seq", *VALUES, "--backward", *OF_RECORDING[1:]),
    "--trust-code",
)
"""Options that the suggested command repeats, unless they have their default values."""


def next_step(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    plan: Plan | None,
    dataset: Dataset | None,
    measured: Speedup | None = None,
    *,
    is_faster: bool = True,
    wrong: Sequence[str] = (),
) -> str:
    """Return one line that suggests the next step; empty if there is nothing to suggest.

    Args:
        plan: plan written by `replay plan`.
        dataset: replayed recording; None if the calls were not recorded.
        measured: speed-up of the whole model with the plan of `--plan`.
        is_faster: False if `replay verify` measured no faster run of the model.
        wrong: kernels with which `replay verify` trained wrongly.
    """
    given, verb = vars(arguments), arguments.verb
    rows = [row for row in rows if row.kernel]  # omit rows of unreadable calls
    if not rows:
        return ""
    found, captures = matrix(rows), _whole_captures(dataset)
    of_others = [flag for flag in OF_RECORDING if flag != "--kernels"]
    if given.get("backward"):  # the doctor and plans are about inference
        is_trained = any(row.call.grad_output == "recorded" for row in rows)
        can_train = is_trained and _can_be_rebuilt(arguments, captures, trusted=True)
        if verb == "" and can_train and (names := _gaining(found)):
            further = ["--backward", "--trust-code", "--kernels", ",".join(names)]
            check = _command(arguments, "verify", *further, flags=of_others)
            return f"see what a training step gains: {check}"
        return _charts(arguments)
    if wrong:
        further = ["--backward", "--kernels", ",".join(wrong)]
        examine = _command(arguments, "", *further, flags=of_others)
        return f"find out which gradients are wrong, and why: {examine}"
    baselines = {kind.baseline for kind in found.kinds}
    compared = [kernel for kernel in found.kernels if kernel.name not in baselines]
    outcomes = {each: {cell.outcome for cell in found.row(each)} for each in found.kernels}
    wrong = [each.name for each in compared or found.kernels if "wrong" in outcomes[each]]
    is_none_correct = all(
        outcomes[each] <= {"wrong", "cannot"} for each in compared or found.kernels
    )
    own = list(dict.fromkeys(row.kernel for row in rows if ".py:" in row.kernel))
    own_wrong = [kernel for kernel in own if kernel in wrong]
    is_joined = given.get("join_ranks") or given.get("env") or given.get("ray")
    if (own_wrong or (wrong and is_none_correct)) and given.get("dir") and not is_joined:
        kernels = ["--kernels", ",".join(dict.fromkeys(own_wrong or wrong))]
        flags = ("--dir", "--call", "--device", "--tolerances")
        examine = _command(arguments, "doctor", *kernels, flags=flags)
        return f"find out what is wrong: {examine}"
    is_inaccurate = any(row.status == "inaccurate" for row in rows)
    if is_none_correct and not is_inaccurate:
        return ""
    if (is_none_correct or own_wrong) and is_inaccurate and verb not in ("plan", "verify"):
        per_call = ["--per-call"] if "per_call" in given else []
        look = _command(arguments, verb, "--metric", "accuracy,stats", *per_call)
        return f"see where {', '.join(dict.fromkeys(own_wrong or wrong))} is wrong: {look}"
    if not given.get("dir"):
        if own:
            examine = shlex.join(["replay", "doctor", "--model", "llama", "--kernels", *own[:1]])
            return f"check {own[0]} on the calls of a model: {examine}"
        return "record what a model really computes: capture --model llama"
    if verb in ("", "verify") and not given.get("plan") and _has_gradients(dataset):
        measure = _command(arguments, verb, "--backward")
        return f"gradients were recorded, so measure training steps too: {measure}"
    gaining = _gaining(found)
    if verb == "" and not gaining:
        is_busy = any(cell.reason == BUSY for cell in found.cells.values())
        return "run this again when the machine is less busy" if is_busy else ""
    if plan is not None and not plan.kernels:
        return (
            f"{arguments.out} changes nothing: no kernel is shown to be faster within {plan.limits}"
        )
    trusted = given.get("trust_code", False)
    if verb != "verify" and _can_be_rebuilt(arguments, captures, trusted=trusted):
        if plan is not None:
            kept = ["--rows", arguments.json] if arguments.json else []
            further = ["--plan", arguments.out, *kept]
            measure = _command(arguments, "verify", *further, flags=OF_RECORDING)
            return f"measure the plan in the model: {measure}"
        if verb == "":
            check = _command(arguments, "verify", "--kernels", ",".join(gaining), flags=of_others)
            return f"see what the whole model gains: {check}"
    if path := given.get("plan") or given.get("out"):
        used = Plan.load(path)
        if not used.kernels:
            return f"{path} changes nothing: it names no kernel but the model's own"
        if measured is not None and measured.verdict == "slow":
            return f"do not use {path}: the model is slower with it ({measured.ratio:.2f}×)"
        if any(row.call.entry_point == "vllm" for row in rows):
            exporting = shlex.join(["replay", "export", str(path), "--to", "vllm"])
            return f"give vLLM the backend that comes nearest to the plan: {exporting}"
        trusted = ", trust_code=True" if used.code else ""
        return f"use the plan in your program: with ar.use_plan({str(path)!r}{trusted}): …"
    if is_faster and len(captures) == 1:
        further = ["--out", "plan.json", "--budget", BUDGET]
        choose = _command(arguments, "plan", *further, flags=OF_RECORDING)
        return f"choose the fastest kernel for each layer: {choose}"
    return _charts(arguments)


def _charts(arguments: argparse.Namespace) -> str:
    if vars(arguments).get("report"):
        return ""
    if arguments.json:
        look = shlex.join(["replay", "report", arguments.json, "-o", "out.html"])
    else:
        look = _command(arguments, arguments.verb, "--report", "out.html")
    return f"look at it as charts, and send it to others: {look}"


def _gaining(found: Matrix) -> list[str]:
    """Return the kernels that are faster in a kind of call and wrong in none."""
    gaining = [
        kernel.name
        for kernel in found.kernels
        if "faster" in (outcomes := {cell.outcome for cell in found.row(kernel)})
        and "wrong" not in outcomes
    ]
    return list(dict.fromkeys(gaining))


def _command(
    arguments: argparse.Namespace, verb: str, *further: str, flags: Sequence[str] = CARRIED
) -> str:
    parts = ["suite", arguments.suite] if verb == "suite" else [verb] if verb else []
    return shlex.join(["replay", *parts, *_carried(arguments, flags), *further])


def _carried(arguments: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """Yield the options that differ from their defaults, with their values."""
    for flag in flags:
        option = OPTIONS.get(flag, {})
        value = vars(arguments).get(option.get("dest") or flag.strip("-").replace("-", "_"))
        if value in (None, False, option.get("default")):
            continue
        for part in value if isinstance(value, list) else [value]:
            yield flag
            if part is not True:
                yield f"{part:g}" if isinstance(part, float) else _text(part)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _can_be_rebuilt(
    arguments: argparse.Namespace, captures: Sequence[CaptureRecord], *, trusted: bool
) -> bool:
    """Return True if `replay verify` can run every model of the recording."""
    try:
        for capture in captures:
            load_arguments(capture, arguments.device or "", trust_code=trusted)
    except Error:
        return False
    return bool(captures)


def _has_gradients(dataset: Dataset | None) -> bool:
    entries = dataset.entries if dataset else []
    return any("grad_output" in entry.header.dtypes for entry in entries)


def _whole_captures(dataset: Dataset | None) -> list[CaptureRecord]:
    """Return the captures; an empty list if they do not count a model's whole calls."""
    try:
        return whole_captures(dataset, "")
    except Error:
        return []
