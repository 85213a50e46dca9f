"""Addresses of tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def steps_to(places, stride):
    """Return `places` · `stride` in 64 bits.

    Neither is negative. Between 32-bit numbers without sign, this is one instruction.
    """
    step = stride + tl.full((), 0, tl.int32)  # a stride of 1 is a number of Python
    if step.dtype == tl.int32:
        step = step.to(tl.uint32)
    return places.to(tl.uint32).to(tl.uint64) * step.to(tl.uint64)
