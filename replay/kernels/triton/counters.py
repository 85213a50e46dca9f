"""Counters by which programs learn who is last: zeros, without a launch to make them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

RESERVED_COUNTERS = 2**18
"""Counters for kernels in CUDA graphs, 1 MiB of them a GPU."""


@dataclass
class _Reserve:
    """Zeros of which each kernel in a CUDA graph gets some for ever."""

    zeros: Tensor
    used: int = 0


_reserves: dict[torch.device, _Reserve] = {}


def counters(count: int, device: torch.device) -> Tensor:
    """(count,) int32 zeros, to be left as zeros.

    Kept per stream, on which kernels follow one another. A CUDA graph may be replayed on any
    stream, beside any other, so each kernel in it has its own; where they are used up, or nothing
    ran before, the graph zeroes them itself at the cost of another node.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if not torch.cuda.is_current_stream_capturing():
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        # In sizes that are powers of two, so that few are kept.
        return _kept_counters(1 << (count - 1).bit_length(), device, stream)
    reserve = _reserves.get(device)
    aligned = -(-count // 4) * 4
    if reserve is None or reserve.used + aligned > RESERVED_COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    reserve.used += aligned
    return reserve.zeros[reserve.used - aligned : reserve.used]


@functools.lru_cache(maxsize=64)
def _kept_counters(count: int, device: torch.device, stream: int) -> Tensor:
    """Zeros for a stream, on which they are made too."""
    if device not in _reserves:
        zeros = torch.zeros(RESERVED_COUNTERS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # a graph may run on any other
        _reserves[device] = _Reserve(zeros)
    return torch.zeros(count, dtype=torch.int32, device=device)
