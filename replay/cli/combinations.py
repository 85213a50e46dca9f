"""Which options of `replay` do not combine. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from replay.cli import comparison_arguments, end_to_end_arguments, profiling, watch

SOURCES = ("dir", "random", "suite", "list_kernels", "selftest")
"""Arguments that say what to do."""


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why the options do not combine; empty if they do."""
    return (
        _misuse_of_sources(arguments)
        or end_to_end_arguments.misuse(arguments)
        or comparison_arguments.misuse(arguments)
        or watch.misuse(arguments)
        or profiling.misuse(arguments)
    )


def _misuse_of_sources(arguments: argparse.Namespace) -> str:
    if not any(getattr(arguments, source) for source in SOURCES):
        return "nothing to replay: give --dir DIR, --random or --suite NAME"
    for name, unset in (("distribution", "normal"), ("mask", "none"), ("scale", None)):
        if arguments.dir and getattr(arguments, name) != unset:
            return f"--{name} is for random calls: give --random or --suite NAME"
    if arguments.versus_random and not arguments.dir:
        return "--versus-random requires recorded calls: give --dir DIR"
    if arguments.call is not None and not arguments.dir:
        return "--call chooses recorded calls: give --dir DIR"
    if arguments.join_ranks and not arguments.dir:
        return "--join-ranks joins recorded calls: give --dir DIR"
    if arguments.resume and arguments.json in (None, "-"):
        return "--resume requires a file to continue: give --json FILE"
    for name in ("report", "plot"):
        if getattr(arguments, name) and (arguments.selftest or arguments.list_kernels):
            return f"--{name} shows a replay: give --dir DIR, --random or --suite NAME"
    if arguments.max_time is not None:
        for name in ("e2e", "plan", "selftest", "list_kernels", "in_process"):
            if getattr(arguments, name):
                return f"--max-time ends a replay in workers: leave out --{name.replace('_', '-')}"
    return _misuse_of_devices(arguments)


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
