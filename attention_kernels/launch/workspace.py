"""Scratch memory of launches, kept from call to call.

The memory holds parts of an output, and counters that tell a program that it is the last one.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.driver import driver

RESERVED_COUNTERS = 2**18
"""Number of counters for kernels in CUDA graphs; they take 1 MiB on each GPU."""


@dataclass
class _Reserve:
    """Zeros for CUDA graphs. Each kernel in a graph permanently gets its own part of the zeros."""

    zeros: Tensor
    used: int = 0


_reserves: dict[torch.device, _Reserve] = {}


@dataclass
class _Workspace:
    """Scratch memory of a stream, shared by kernels that run one after another."""

    room: Tensor
    zeros: Tensor


def workspace(numbers: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return at least `numbers` float32 elements with undefined values, and `count` int32 zeros.

    A kernel that uses the zeros must reset them to zero. Both tensors are kept for each stream. A
    CUDA graph may be replayed on any stream, at the same time as others, so each kernel in a graph
    has its own tensors. If the zeros for graphs are used up, or no kernel ran before, the graph
    clears new memory itself in an additional node.
    """
    if device.index is None:  # in the interpreter; the type would take the host longer to ask for
        return _new(numbers, device), torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _new(numbers, device), _reserved(count, device)
    kept = _kept(device, driver.active.get_current_stream(device.index))
    if kept.room.numel() < numbers:
        kept.room = _lasting(_ample(numbers), torch.float32, device)
    if kept.zeros.numel() < count:
        kept.zeros = _lasting(_ample(count), torch.int32, device)
    return kept.room, kept.zeros


def _ample(size: int) -> int:
    """Return `size` rounded up (by at most an eighth if large), so that memory rarely has to
    grow."""
    step = max(1024, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def _new(numbers: int, device: torch.device) -> Tensor:
    return torch.empty(numbers, dtype=torch.float32, device=device)


def _lasting(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that stay allocated after the current CUDA graph, for use on any stream.

    Before PyTorch captures a graph (`torch.compile(mode="reduce-overhead")`), it runs the code
    once, with all allocations of the thread in the graph's memory, which it overwrites later. A
    new thread allocates elsewhere, on the default stream. If the memory is freed, it is not used
    again before the current stream has finished with it.
    """
    found: list[Tensor] = []

    def allocate() -> None:
        with torch.cuda.device(device):
            found.append(torch.zeros(size, dtype=dtype, device=device))
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    if not found:
        raise torch.OutOfMemoryError(f"no room for {size} numbers of scratch memory on {device}")
    found[0].record_stream(torch.cuda.current_stream(device))
    return found[0]


def _reserved(count: int, device: torch.device) -> Tensor:
    reserve = _reserves.get(device)
    aligned = -(-count // 4) * 4
    if reserve is None or reserve.used + aligned > RESERVED_COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    reserve.used += aligned
    return reserve.zeros[reserve.used - aligned : reserve.used]


@functools.lru_cache(maxsize=64)
def _kept(device: torch.device, stream: int) -> _Workspace:
    """Return the memory that is kept for a stream, which is empty at first. The stream must be the
    current one."""
    if device not in _reserves:
        _reserves[device] = _Reserve(_lasting(RESERVED_COUNTERS, torch.int32, device))
    return _Workspace(_new(0, device), torch.zeros(0, dtype=torch.int32, device=device))
