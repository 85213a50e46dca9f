"""Memory that a launch uses and nobody reads afterwards, kept so that no call has to get it.

SharedRoom for the parts of an output, and counters by which programs learn who is last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.driver import driver

RESERVED_COUNTERS = 2**18
"""Counters for kernels in CUDA graphs, 1 MiB of them a GPU."""


@dataclass
class _Reserve:
    """Zeros of which each kernel in a CUDA graph gets some for ever."""

    zeros: Tensor
    used: int = 0


_reserves: dict[torch.device, _Reserve] = {}


@dataclass
class _Workspace:
    """Of a stream, on which kernels follow one another."""

    room: Tensor
    zeros: Tensor


def workspace(numbers: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """At least `numbers` of float32 with any values, and `count` of int32 that are zeros.

    Whoever uses the zeros leaves zeros. Both are kept per stream. A CUDA graph may be replayed on
    any stream, beside any other, so each kernel in it has its own; where the zeros for graphs are
    used up, or nothing ran before, the graph zeroes them itself at the cost of another node.
    """
    if device.type != "cuda":
        return _new(numbers, device), torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _new(numbers, device), _reserved(count, device)
    kept = _kept(device, driver.active.get_current_stream(device.index))
    if kept.room.numel() < numbers:
        kept.room = _new(_ample(numbers), device)
    if kept.zeros.numel() < count:
        kept.zeros = torch.zeros(_ample(count), dtype=torch.int32, device=device)
    return kept.room, kept.zeros


def _ample(size: int) -> int:
    """`size` or somewhat more (an eighth, if it is large), so that it is seldom too small."""
    step = max(1024, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def _new(numbers: int, device: torch.device) -> Tensor:
    return torch.empty(numbers, dtype=torch.float32, device=device)


def _reserved(count: int, device: torch.device) -> Tensor:
    reserve = _reserves.get(device)
    aligned = -(-count // 4) * 4
    if reserve is None or reserve.used + aligned > RESERVED_COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    reserve.used += aligned
    return reserve.zeros[reserve.used - aligned : reserve.used]


@functools.lru_cache(maxsize=64)
def _kept(device: torch.device, stream: int) -> _Workspace:
    """What is kept for a stream, on which it is made too; nothing yet."""
    if device not in _reserves:
        zeros = torch.zeros(RESERVED_COUNTERS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # a graph may run on any other
        _reserves[device] = _Reserve(zeros)
    return _Workspace(_new(0, device), torch.zeros(0, dtype=torch.int32, device=device))
