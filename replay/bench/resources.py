"""The resources of a kernel on the GPU: memory, Triton programs, registers and warps."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from replay.rows.row import Program

T = TypeVar("T")


def launched_programs(run: Callable[[], object]) -> list[Program]:
    """Return the Triton programs that `run` launches, in order of first launch.

    The list is empty for kernels that are not written in Triton or that `torch.compile` launches
    itself. The list is also empty if Triton is missing, interprets kernels, or is older than 3.4.
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
    # The hook gives only a driver handle; the compiled object of that handle holds the figures.
    loaded = {
        found.function: found
        for found in gc.get_objects()
        if isinstance(found, compiler.CompiledKernel) and found.function is not None
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
    """Return the result of `function`, and the peak memory in bytes that its call needed.

    The peak counts allocations by torch's CUDA allocator, including the result, but not memory that
    a kernel takes from the driver. On the CPU, memory is not measured and the peak is None.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return function(), None
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # makes the allocator free memory that another stream used
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    collecting = gc.isenabled()
    gc.disable()  # a collection during the call would hide part of the call's memory
    try:
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    finally:
        if collecting:
            gc.enable()
