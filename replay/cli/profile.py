"""`replay profile`: runs one kernel on one call, under Nsight Compute or another profiler."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.api.call_choices import RandomCalls
from replay.api.chosen_device import device_of
from replay.api.chosen_kernels import check_kernels
from replay.cli.files import UsageError
from replay.cli.requests import chosen, recorded_calls
from replay.cli.shared_options import RECORDING, SHAPE, VALUES, VerbParser

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Kernel
    from replay.workloads.workload import Workload

WARM_UP = 3
"""Number of calls before the profiled one. The first call compiles; the third and later calls may
replay a CUDA graph."""

EXAMPLES = """\
  replay profile --dir captured_inputs --call llama-000003 --kernels triton-fa3
  replay profile random -hq 24 -sq 4608 -d 128 --kernels torch-flash
"""


def parser() -> VerbParser:
    """Build the parser of `replay profile`."""
    return _parser("profile", *RECORDING)


def parser_with_shape() -> VerbParser:
    """Build the parser of `replay profile random`."""
    return _parser("profile random", *SHAPE, "--causal", *VALUES)


def _parser(name: str, *calls: str) -> VerbParser:
    command = VerbParser(
        name,
        "Print the command of Nsight Compute that profiles one kernel on one call (with\n"
        "`profile random`, of any shape). Other profilers: `replay profile --once`.",
        EXAMPLES,
    )
    command.add(*calls, "--kernels", "--device")
    command.add_argument(
        "--once",
        action="store_true",
        help="run the kernel in this process, warmed up, between cudaProfilerStart and Stop",
    )
    command.add_common()
    return command


def run_once(kernel: Kernel, workload: Workload, device: torch.device) -> None:
    """Warm up the kernel, then run it once between cudaProfilerStart and Stop, in an NVTX range.

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


def run(arguments: argparse.Namespace) -> int:
    """Print the command of the profiler; with `--once`, run the call to be profiled instead.

    Raises:
        Error: an argument cannot be used, or there is more than one kernel or call.
    """
    is_random = "dir" not in arguments
    calls = chosen(RandomCalls, arguments) if is_random else recorded_calls(arguments)
    calls.check()
    check_kernels(arguments.kernels, [])
    device = device_of(arguments.device)
    from replay.kernels.registry import select

    kernels, _ = select(arguments.kernels)
    dataset = calls.opened(quiet=arguments.quiet)
    workloads = calls.found(dataset, quiet=arguments.quiet).workloads
    if not len(kernels) == len(workloads) == 1:
        remedy = "one value for each size" if is_random else "one call with --call"
        raise UsageError(
            f"a profile runs one kernel on one call, got {counted(len(kernels), 'kernel')} and "
            f"{counted(len(workloads), 'call')}: name one kernel with --kernels, and {remedy}"
        )
    if arguments.once:
        run_once(kernels[0], workloads[0], device)
        return 0
    # The profiler records only kernels between cudaProfilerStart and cudaProfilerStop.
    profiler = ["ncu", "--profile-from-start", "off", "--set", "full"]
    print(shlex.join([*profiler, sys.executable, "-m", "replay", *arguments.command, "--once"]))
    return 0
