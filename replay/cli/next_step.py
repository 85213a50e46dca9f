"""The closing line of a replay: what to do next, with a command that can be pasted."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from attention_replay.errors import Error
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.joined_calls import is_part
from replay.bench.runner import DEFAULT_BASELINE
from replay.cli.arguments import SHAPE, parser
from replay.cli.combinations import flag
from replay.end_to_end.rebuild import load_arguments
from replay.plan.plan import Plan
from replay.rows.row import Row

CARRIED = (
    *("dir", "join_ranks", "random", "suite", *SHAPE, "max_seq", "seed"),
    *("causal", "mask", "scale", "distribution", "dtype"),
    *("kernels", "keep", "page_size", "device", "env", "env_file", "timeout", "tolerances"),
)
"""Options that the next command takes over from this one, where they were given."""

BUDGET = "cosine=0.998"


def next_step(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    plan: Plan | None,
    dataset: Dataset | None,
) -> str:
    """Say in one line what to do after a replay; empty if nothing suggests itself.

    Args:
        plan: what `--plan` wrote.
        dataset: what was replayed; None if that was not recorded, or by an older version.
    """
    rows = [row for row in rows if row.kernel]  # and not of a call that cannot be read
    if not rows:
        return ""
    ran = {row.id for row in rows if row.accuracy}
    if len(ran) < 2 and any(row.status == "unavailable" for row in rows):
        return "see what the other kernels need: replay --list-kernels"
    baselines = {row.speedup.vs for row in rows if row.speedup}
    baselines.add(arguments.baseline_kernel or DEFAULT_BASELINE)  # where none has a speed-up
    compared = [row for row in rows if row.kernel not in baselines] or rows
    is_none_correct = not any(row.is_correct for row in compared)
    wrong = dict.fromkeys(row.kernel for row in rows if row.status in ("inaccurate", "crash"))
    own = [kernel for kernel in wrong if ".py:" in kernel]
    if (own or (wrong and is_none_correct)) and _can_be_diagnosed(arguments):
        return f"find out what is wrong: {_doctor(arguments, own or list(wrong))}"
    if is_none_correct:
        look = _command(arguments, "--metric", "accuracy", "--per-call", "--compare-stats")
        return f"no kernel is correct; see where each is wrong: {look}"
    if not arguments.dir:
        return "record what a model really computes: capture --model llama"
    written, used = arguments.plan, arguments.use_plan
    if plan is not None and not plan.kernels:
        return f"{written} changes nothing: no kernel is faster within {plan.budget}"
    if used is None and _can_be_rebuilt(arguments, _whole_captures(dataset)):
        if plan is not None:
            measure = _command(arguments, "--e2e", "--use-plan", written)
            return f"measure the plan in the model: {measure}"
        if not arguments.e2e:
            return f"see what the whole model gains: {_command(arguments, '--e2e')}"
    if path := used or written:
        if not Plan.load(path).kernels:
            return f"{path} changes nothing: it names no kernel but the model's own"
        trusted = ", trust_code=True" if Plan.load(path).code else ""
        return f"use the plan in your program: with replay.use_plan({str(path)!r}{trusted}): …"
    if _has_one_census(_whole_captures(dataset)):
        choose = _command(arguments, "--plan", "plan.json", "--budget", BUDGET)
        return f"choose the fastest kernel for each layer: {choose}"
    if arguments.report:
        return ""
    if arguments.json:
        look = shlex.join(["replay", "report", arguments.json, "-o", "out.html"])
    else:
        look = _command(arguments, "--report", "out.html")
    return f"look at it as charts, and send it to others: {look}"


def _can_be_diagnosed(arguments: argparse.Namespace) -> bool:
    return bool(arguments.dir) and not (
        arguments.join_ranks or arguments.env or arguments.env_file or arguments.ray
    )


def _doctor(arguments: argparse.Namespace, kernels: Sequence[str]) -> str:
    given = [
        part
        for name in ("call", "device", "tolerances")
        if (value := getattr(arguments, name)) is not None
        for part in (f"--{name}", value)
    ]
    where = ["--dir", arguments.dir, "--kernels", ",".join(kernels)]
    return shlex.join(["replay", "doctor", *where, *given])


def _command(arguments: argparse.Namespace, *further: str) -> str:
    return shlex.join(["replay", *_carried(arguments), *further])


def _carried(arguments: argparse.Namespace) -> Iterator[str]:
    defaults = parser().parse_args([])
    for name in CARRIED:
        given = getattr(arguments, name)
        if given == getattr(defaults, name):
            continue
        for value in given if isinstance(given, list) else [given]:
            yield flag(name)
            if value is not True:
                yield f"{value:g}" if isinstance(value, float) else str(value)


def _can_be_rebuilt(arguments: argparse.Namespace, captures: Sequence[CaptureRecord]) -> bool:
    """Whether `--e2e` can run every model of the recording; how is for `read_options` to say."""
    try:
        for capture in captures:
            load_arguments(capture, arguments.device or "", trust_code=arguments.trust_code)
    except Error:
        return False
    return bool(captures) and all(each.census.get("rows") for each in captures)


def _has_one_census(captures: Sequence[CaptureRecord]) -> bool:
    """Whether the recording counts the calls of one model, as a plan requires."""
    return len(captures) == 1 and bool(captures[0].census.get("rows"))


def _whole_captures(dataset: Dataset | None) -> list[CaptureRecord]:
    """Those of a recording, unless some of its calls are only heads or parts of the model's."""
    if dataset is None or any(is_part(entry.origin) for entry in dataset.entries):
        return []
    return [] if any(each.heads for each in dataset.captures) else dataset.captures
