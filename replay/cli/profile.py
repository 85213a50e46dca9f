"""`replay profile`: runs one kernel on one call, under Nsight Compute or another profiler."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from capture.text.counted import counted
from replay.api.chosen_device import device_of
from replay.cli import shared_options as options
from replay.cli.files import UsageError
from replay.cli.requests import random_call, recorded_calls

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Kernel
    from replay.workloads.workload import Workload

WARM_UP = 3
"""Calls before the profiled one: the first compiles, and from the third on a CUDA graph may be
replayed."""

EXAMPLES = """\
  replay profile --dir captured_inputs --call llama-000007 --kernels triton-fa3
  replay profile random -hq 24 -sq 4608 -d 128 --kernels torch-flash
"""


def parser(*, is_random: bool = False) -> OneSentenceParser:
    """Build the parser of `replay profile`, or of `replay profile random`."""
    command = options.verb(
        "profile random" if is_random else "profile",
        "Print the command of Nsight Compute that profiles one kernel on one call (with\n"
        "`profile random`, of any shape). Other profilers: `replay profile --once`.",
        EXAMPLES,
    )
    if is_random:
        options.add_shape(command)
        options.add_values(command, command)
    else:
        options.add_recording(command)
    options.add_kernels(command)
    options.add_device(command)
    command.add_argument(
        "--once",
        action="store_true",
        help="run the kernel in this process, warmed up, between cudaProfilerStart and Stop",
    )
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Print the profiler's command or, with `--once`, run the call to be profiled.

    Raises:
        Error: an argument cannot be used, or there is more than one kernel or call.
    """
    is_random = list(argv[:1]) == ["random"]
    arguments = parser(is_random=is_random).parse_args(argv[1:] if is_random else argv)
    return narrated(arguments.verbose)(partial(_run, arguments, argv, is_random))()


def ncu_command(given: Sequence[str]) -> str:
    """Return the command of Nsight Compute that profiles the call named by these arguments.

    The command profiles only the kernels between cudaProfilerStart and cudaProfilerStop.
    """
    profiler = ["ncu", "--profile-from-start", "off", "--set", "full"]
    return shlex.join([*profiler, sys.executable, "-m", "replay", "profile", *given, "--once"])


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


def _run(arguments: argparse.Namespace, argv: Sequence[str], is_random: bool) -> int:
    calls = random_call(arguments) if is_random else recorded_calls(arguments)
    calls.check()
    device = device_of(arguments.device)
    from replay.kernels.registry import select

    kernels, _ = select(arguments.kernels)
    dataset = calls.opened(quiet=arguments.quiet)
    workloads = calls.found(dataset, quiet=arguments.quiet).workloads
    if not len(kernels) == len(workloads) == 1:
        raise UsageError(
            f"a profile runs one kernel on one call, got {counted(len(kernels), 'kernel')} and "
            f"{counted(len(workloads), 'call')}: name one with --kernels, and one with --call"
        )
    if arguments.once:
        run_once(kernels[0], workloads[0], device)
    else:
        print(ncu_command(argv))
    return 0
