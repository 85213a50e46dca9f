"""Which options of `replay` do not combine. Imports no torch."""

from __future__ import annotations

import argparse

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
    return "" if arguments.gpus is None else _misuse_of_gpus(arguments)


def _misuse_of_gpus(arguments: argparse.Namespace) -> str:
    """Say in one sentence why `--gpus` does not combine with the rest; empty if it does."""
    if arguments.device is not None:
        return "--gpus says which devices: leave out --device"
    if arguments.in_process:
        return "--gpus measures each GPU in worker processes of its own: leave out --in-process"
    for name in ("selftest", "list_kernels", "e2e"):
        if getattr(arguments, name):
            return f"--{name.replace('_', '-')} runs on one GPU: leave out --gpus, give --device"
    return ""
