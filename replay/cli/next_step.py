"""Closing line of a replay: the suggested next step, with a command to paste."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from attention_replay.errors import Error
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.joined_calls import is_part
from replay.api.plan_model import BUDGET
from replay.bench.runner import DEFAULT_BASELINE
from replay.cli.shared_options import SHAPE
from replay.end_to_end.rebuild import load_arguments
from replay.plan.plan import Plan
from replay.rows.row import Row

CARRIED = (
    *("dir", "join_ranks", *SHAPE, "max_seq", "seed"),
    *("causal", "mask", "scale", "distribution", "dtype"),
    *("kernels", "device", "env", "timeout", "tolerances"),
)
"""Options passed on to the next command, if they were given and the next command has them."""

OF_RECORDING = ("dir", "kernels", "device", "env", "timeout", "tolerances")
"""Options that `plan` and `verify` share with the default verb."""


def next_step(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    rows: Sequence[Row],
    plan: Plan | None,
    dataset: Dataset | None,
) -> str:
    """Return the suggested next step after a verb in one line; empty if there is none.

    Args:
        parser: parser of the verb.
        plan: plan written by `replay plan`.
        dataset: replayed recording; None if the calls were not recorded.
    """
    given = vars(arguments)
    verb = parser.prog.removeprefix("replay").strip()
    rows = [row for row in rows if row.kernel]  # rows of unreadable calls are left out
    if not rows:
        return ""
    ran = {row.id for row in rows if row.accuracy}
    if len(ran) < 2 and any(row.status == "unavailable" for row in rows):
        return "see what the other kernels need: replay kernels"
    baselines = {row.speedup.vs for row in rows if row.speedup}
    baselines.add(given.get("baseline_kernel") or DEFAULT_BASELINE)  # if no row has a speed-up
    compared = [row for row in rows if row.kernel not in baselines] or rows
    is_none_correct = not any(row.is_correct for row in compared)
    wrong = dict.fromkeys(row.kernel for row in rows if row.status in ("inaccurate", "crash"))
    own = [kernel for kernel in wrong if ".py:" in kernel]
    if (own or (wrong and is_none_correct)) and _can_be_diagnosed(arguments):
        return f"find out what is wrong: {_doctor(arguments, own or list(wrong))}"
    if is_none_correct and verb not in ("plan", "verify"):
        per_call = ["--per-call"] if "per_call" in given else []
        look = _command(arguments, parser, verb, "--metric", "accuracy,stats", *per_call)
        return f"no kernel is correct; see where each is wrong: {look}"
    if not given.get("dir"):
        return "record what a model really computes: capture --model llama"
    captures = _whole_captures(dataset)
    if plan is not None and not plan.kernels:
        return f"{arguments.out} changes nothing: no kernel is faster within {plan.budget}"
    if verb != "verify" and _can_be_rebuilt(arguments, captures):
        if plan is not None:
            kept = ["--rows", arguments.json] if arguments.json else []
            further = ["--plan", arguments.out, *kept]
            measure = _command(arguments, parser, "verify", *further, names=OF_RECORDING)
            return f"measure the plan in the model: {measure}"
        if verb == "":
            check = _command(arguments, parser, "verify", names=OF_RECORDING)
            return f"see what the whole model gains: {check}"
    if path := given.get("plan") or given.get("out"):
        if not Plan.load(path).kernels:
            return f"{path} changes nothing: it names no kernel but the model's own"
        trusted = ", trust_code=True" if Plan.load(path).code else ""
        return f"use the plan in your program: with replay.use_plan({str(path)!r}{trusted}): …"
    if _has_one_census(captures):
        further = ["--out", "plan.json", "--budget", BUDGET]
        choose = _command(arguments, parser, "plan", *further, names=OF_RECORDING)
        return f"choose the fastest kernel for each layer: {choose}"
    if given.get("report"):
        return ""
    if arguments.json:
        look = shlex.join(["replay", "report", arguments.json, "-o", "out.html"])
    else:
        look = _command(arguments, parser, verb, "--report", "out.html")
    return f"look at it as charts, and send it to others: {look}"


def _can_be_diagnosed(arguments: argparse.Namespace) -> bool:
    given = vars(arguments)
    if not given.get("dir"):
        return False
    return not (given.get("join_ranks") or arguments.env or given.get("ray"))


def _doctor(arguments: argparse.Namespace, kernels: Sequence[str]) -> str:
    given = [
        part
        for name in ("call", "device", "tolerances")
        if (value := vars(arguments).get(name)) is not None
        for part in (f"--{name}", value)
    ]
    where = ["--dir", arguments.dir, "--kernels", ",".join(kernels)]
    return shlex.join(["replay", "doctor", *where, *given])


def _command(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    verb: str,
    *further: str,
    names: Sequence[str] = CARRIED,
) -> str:
    parts = [verb] if verb else []
    if verb == "suite":
        parts.append(arguments.suite)
    carried = _carried(arguments, parser, names)
    return shlex.join(["replay", *parts, *carried, *further])


def _carried(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, names: Sequence[str]
) -> Iterator[str]:
    for name in names:
        value = vars(arguments).get(name)
        if value in (None, False, []) or value == parser.get_default(name):
            continue
        for part in value if isinstance(value, list) else [value]:
            yield f"-{name}" if name in SHAPE else f"--{name.replace('_', '-')}"
            if part is not True:
                yield f"{part:g}" if isinstance(part, float) else str(part)


def _can_be_rebuilt(arguments: argparse.Namespace, captures: Sequence[CaptureRecord]) -> bool:
    """Return True if `replay verify` can run every model of the recording."""
    trusted = vars(arguments).get("trust_code", False)
    try:
        for capture in captures:
            load_arguments(capture, arguments.device or "", trust_code=trusted)
    except Error:
        return False
    return bool(captures) and all(capture.census.get("rows") for capture in captures)


def _has_one_census(captures: Sequence[CaptureRecord]) -> bool:
    """Return True if the recording counts the calls of a single model, as a plan requires."""
    return len(captures) == 1 and bool(captures[0].census.get("rows"))


def _whole_captures(dataset: Dataset | None) -> list[CaptureRecord]:
    """Return the captures; empty if some calls contain only heads or parts of the model's calls."""
    if dataset is None or any(is_part(entry.origin) for entry in dataset.entries):
        return []
    return [] if any(capture.heads for capture in dataset.captures) else dataset.captures
