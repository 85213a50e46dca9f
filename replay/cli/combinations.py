"""Which options of `replay` do not combine. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from replay.cli import comparison_arguments, end_to_end_arguments, profiling, watch
from replay.cli.arguments import SHAPE
from replay.cli.files import stdout_is_taken

SOURCES = ("dir", "random", "suite", "list_kernels", "selftest")
"""Arguments that say what to do."""

REPLAYS = ("dir", "random", "suite")


class Use(NamedTuple):
    """Options that only some of `SOURCES` use; elsewhere they are refused, not ignored."""

    options: tuple[str, ...]
    sources: tuple[str, ...]
    remedy: str
    """Completes a sentence that begins with the option."""


OF_REPLAYS = "give --dir DIR, --random or --suite NAME"

USES = (
    Use((*SOURCES, "device", "quiet", "verbose", "debug"), SOURCES, ""),
    Use(SHAPE, ("random",), "is of one random shape: give --random"),
    Use(
        ("causal", "mask", "scale", "distribution", "dtype"),
        ("random", "suite"),
        "is for random calls: give --random or --suite NAME",
    ),
    Use(("max_seq",), ("suite",), "chooses from a list of shapes: give --suite NAME"),
    Use(("call",), ("dir",), "chooses recorded calls: give --dir DIR"),
    Use(("join_ranks",), ("dir",), "joins recorded calls: give --dir DIR"),
    Use(("versus_random",), ("dir",), "requires recorded calls: give --dir DIR"),
    Use(end_to_end_arguments.OPTIONS, ("dir",), "is about a recorded model: give --dir DIR"),
    Use(("report", "plot"), REPLAYS, f"shows a replay: {OF_REPLAYS}"),
    Use(
        ("env", "env_file", "timeout", "in_process"),
        (*REPLAYS, "list_kernels"),
        f"is about kernels: {OF_REPLAYS}, or --list-kernels",
    ),
    Use(
        ("json",),
        (*REPLAYS, "selftest"),
        f"is for what is measured: {OF_REPLAYS}, or --selftest",
    ),
    Use(
        (
            *("kernels", "keep", "page_size", "variants", "seed"),
            *("cache", "rounds", "calls_before", "max_seconds", "max_time", "max_noise"),
            *("baseline_kernel", "watch", "ncu", "once", "gpus", "ray"),
            *("metric", "errors_against", "tolerances", "compare_stats", "resources", "per_call"),
            *("resume", "csv", "benchmark_json", "save_output", "check"),
            *("save_baseline", "compare_to", "spread", "fail_on"),
        ),
        REPLAYS,
        f"is about a replay: {OF_REPLAYS}",
    ),
)
"""Each option is in one of them; a test compares them with what is read."""


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why the options do not combine; empty if they do."""
    return (
        _misuse_of_sources(arguments)
        or end_to_end_arguments.misuse(arguments)
        or comparison_arguments.misuse(arguments)
        or watch.misuse(arguments)
        or profiling.misuse(arguments)
        or _unused(arguments)
    )


def _misuse_of_sources(arguments: argparse.Namespace) -> str:
    if not any(getattr(arguments, source) for source in SOURCES):
        return f"nothing to replay: {OF_REPLAYS}"
    if arguments.resume and arguments.json in (None, "-"):
        return "--resume requires a file to continue: give --json FILE"
    if arguments.max_time is not None:
        for name in ("e2e", "plan", "selftest", "list_kernels", "in_process"):
            if getattr(arguments, name):
                return f"--max-time ends a replay in workers: leave out --{name.replace('_', '-')}"
    return _misuse_of_devices(arguments)


def _unused(arguments: argparse.Namespace) -> str:
    """Say of an option that was given why it would do nothing; empty if there is none."""
    (source,) = (name for name in SOURCES if getattr(arguments, name))
    uses = {option: use for use in USES for option in use.options}
    for name in arguments.given:
        if source not in uses[name].sources:
            return f"{flag(name)} {uses[name].remedy}"
    if arguments.in_process and "timeout" in arguments.given:
        return "--in-process has no worker that --timeout could end: leave out one of them"
    if arguments.per_call and stdout_is_taken(arguments):
        return "--per-call is about tables: name a file in place of -"
    return ""


def flag(name: str) -> str:
    """The option of an attribute: `-sq` of `sq`, `--max-seq` of `max_seq`."""
    return f"-{name}" if name in SHAPE else f"--{name.replace('_', '-')}"


ONE_TYPE = ("plan", "report", "plot", "benchmark_json", "compare_to", "save_baseline")
"""Options about calls that are replayed once, not on each of several types of device."""


def misuse_of_types(types: Sequence[str], arguments: argparse.Namespace) -> str:
    """Say in one sentence what several types of device do not combine with; empty if they do."""
    for name in ONE_TYPE if len(types) > 1 else ():
        if getattr(arguments, name):
            return (
                f"--{name.replace('_', '-')} is about one type of device, and this cluster has "
                f"{' and '.join(types)}: leave it out, or replay on a cluster of one type"
            )
    return ""


def _misuse_of_devices(arguments: argparse.Namespace) -> str:
    """Say in one sentence why `--gpus` or `--ray` does not combine; empty if it does."""
    given = [name for name in ("gpus", "ray") if getattr(arguments, name) is not None]
    if not given:
        return ""
    if len(given) > 1:
        return "--gpus is for this host, --ray for a cluster: leave out one of them"
    (several,) = given
    if arguments.device is not None:
        return f"--{several} says which devices: leave out --device"
    if arguments.in_process:
        return f"--{several} measures in worker processes: leave out --in-process"
    for name in ("selftest", "list_kernels", "e2e"):
        if getattr(arguments, name):
            option = name.replace("_", "-")
            return f"--{option} runs on one device: leave out --{several}, give --device"
    if arguments.save_output is not None and several == "ray":
        return "--save-output writes where kernels run: leave out --ray"
    return ""
