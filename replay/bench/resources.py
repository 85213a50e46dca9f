"""What a kernel takes of the GPU: memory; and its Triton programs, registers and warps."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from replay.rows.row import Program

T = TypeVar("T")


def launched_programs(run: Callable[[], object]) -> list[Program]:
    """The Triton programs that `run` launches, in order of first launch.

    Empty for kernels that are not written in Triton, for those that `torch.compile` launches by
    itself, and where Triton is missing, interprets, or is older than 3.4.
    """
    try:
        hooks = importlib.import_module("triton.knobs").runtime.launch_enter_hook
        compiler = importlib.import_module("triton.compiler.compiler")
    except (ImportError, AttributeError):
        return []
    handles: list[Any] = []

    def launch(metadata: Any) -> None:
        handles.append(metadata.get()["function"])

    hooks.add(launch)
    try:
        run()
    finally:
        hooks.remove(launch)
    # The hook tells a driver handle; the object that knows the figures is in Triton's cache.
    loaded = {
        each.function: each
        for each in gc.get_objects()
        if isinstance(each, compiler.CompiledKernel) and each.function is not None
    }
    return [_program(loaded[handle]) for handle in dict.fromkeys(handles) if handle in loaded]


def _program(kernel: Any) -> Program:
    return Program(
        name=kernel.name,
        registers=kernel.n_regs,
        spills=kernel.n_spills,
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
    )


def with_peak_bytes(function: Callable[[], T], device: torch.device | str) -> tuple[T, int | None]:
    """What `function` returns, and the most bytes that it needed on a CUDA device beyond what was
    there, the result included.

    Counts what torch's allocator handed out; memory that a kernel takes from the driver itself is
    not seen. None on the CPU, where it is not measured.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return function(), None
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # the allocator now frees what another stream had still used
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    collecting = gc.isenabled()
    gc.disable()  # garbage collected during the call would hide what the call needs
    try:
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    finally:
        if collecting:
            gc.enable()
