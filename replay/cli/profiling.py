"""`--ncu` prints a profiler's command, and `--once` is what it runs: one kernel on one call."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay.cli.arguments import SHAPE
from replay.cli.files import UsageError

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Kernel
    from replay.workloads.workload import Workload

WARM_UP = 3
"""Calls before the one that is profiled: the first compile, and from the third on a CUDA graph may
be replayed."""

USED = (
    *("ncu", "once", "dir", "call", "join_ranks", "random", "suite", "max_seq", "seed"),
    *(*SHAPE, "causal", "mask", "scale", "distribution", "dtype"),
    *("kernels", "variants", "keep", "page_size", "device", "quiet", "verbose", "debug"),
)
"""Options of `replay` that a profile of one kernel in one process has a place for."""


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why there is nothing to profile; empty if there is."""
    if not (arguments.ncu or arguments.once):
        return ""
    if arguments.ncu and arguments.once:
        return "--ncu prints the command that runs --once: give one of them"
    asked = "ncu" if arguments.ncu else "once"
    for name in arguments.given:
        if name not in USED:
            option = name.replace("_", "-")
            return f"--{asked} is for one kernel on one call: leave out --{option}"
    return ""


def ncu_command(given: Sequence[str]) -> str:
    """The command of Nsight Compute that profiles what these arguments of `replay` name.

    It sees the kernels between cudaProfilerStart and cudaProfilerStop alone.
    """
    # argparse takes the beginning of an option for the option.
    others = [each for each in given if len(each) < 4 or not "--ncu".startswith(each)]
    profiler = ["ncu", "--profile-from-start", "off", "--set", "full"]
    return shlex.join([*profiler, sys.executable, "-m", "replay", *others, "--once"])


def only_pair(kernels: Sequence[Kernel], workloads: Sequence[Workload]) -> tuple[Kernel, Workload]:
    """The one kernel and the one call.

    Raises:
        UsageError: there are more.
    """
    if len(kernels) == len(workloads) == 1:
        return kernels[0], workloads[0]
    raise UsageError(
        f"a profile is of one kernel on one call, and this is {len(kernels)} × {len(workloads)} of "
        "them: name one with --kernels, and one with --call"
    )


def run_once(kernel: Kernel, workload: Workload, device: torch.device) -> None:
    """Warm up, and run the kernel once between cudaProfilerStart and Stop, in an NVTX range.

    Nothing is judged or timed, and nothing else runs in this process.

    Raises:
        UsageError: the kernel cannot run the call.
    """
    import torch

    from replay.bench.forms import Forms
    from replay.isolation.inputs import drop_in

    form = Forms.of(workload.load(device)).form(kernel, device)
    if form.refused is not None:
        raise UsageError(f"{kernel.name} cannot run {workload.name}: {form.refused.reason}")
    run = drop_in(kernel.loaded().attention, form.call)
    with torch.no_grad():
        for _ in range(WARM_UP):
            run()
        if device.type != "cuda":
            run()
            return
        torch.cuda.synchronize(device)
        with torch.cuda.profiler.profile(), torch.cuda.nvtx.range(kernel.name):
            run()
            torch.cuda.synchronize(device)
