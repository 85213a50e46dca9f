"""What a kernel's Triton programs take of the GPU: registers, spills, shared memory, warps."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """One compiled Triton program, as the driver loaded it."""

    name: str
    registers: int
    """Per thread."""
    spills: int
    """Registers per thread that did not fit and live in local memory."""
    shared_bytes: int
    """Shared memory per block."""
    warps: int
    """Per block."""


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
