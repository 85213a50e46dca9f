"""Rounding to INT8 and FP8 (e4m3), and the mean that is subtracted from keys before it."""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.matmul import INTERPRETED

SMALLEST_MAXIMUM = tl.constexpr(1e-12)
"""A group whose largest number is below becomes zeros: its scale must not underflow."""

INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)
"""Largest e4m3 number."""
LOG2_FP8_MAX = tl.constexpr(8.8073549)
"""Its logarithm, rounded down."""

SAMPLE = tl.constexpr(64)
"""Keys whose mean is subtracted: one of each of as many even parts of the sequence."""
SAMPLE_STEP = tl.constexpr(39)
"""Where in its part a key of the sample is moves on by 39/64 of it, about the golden ratio: what
recurs in the sequence, as a column of an image does, is not met at the same place each time."""


@triton.jit
def to_int8(x, largest):
    """x / largest · 127, rounded to the nearest."""
    return tl.floor(x * (1.0 / largest) * INT8_MAX + 0.5).to(tl.int8)


@triton.jit
def round_to_fp8(x):
    """x, at most 448 in magnitude, as e4m3, rounded to the nearest."""
    if INTERPRETED:
        # Triton's interpreter halves numbers that round up to a power of two: leave it none.
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 1e-9))), -6.0)
        step = tl.exp2(exponent - 3)
        x = tl.minimum(tl.maximum(tl.floor(x / step + 0.5) * step, -FP8_MAX), FP8_MAX)
    return x.to(tl.float8e4nv)


@triton.jit
def to_fp8(x, largest):
    """x / largest · 448 as e4m3, rounded to the nearest."""
    return round_to_fp8(x * (1.0 / largest) * FP8_MAX)


@triton.jit
def sampled_mean(key_ptr, stride_s, stride_d, columns, is_column, kv_len):
    """The mean (D,) of `SAMPLE` of a head's first `kv_len` keys; `key_ptr` is that of the head.
    Columns that are none are zeros and not read."""
    part = tl.arange(0, SAMPLE)
    place = (part * SAMPLE + part * SAMPLE_STEP % SAMPLE).to(tl.int64)
    sampled = place * kv_len // (SAMPLE * SAMPLE)
    sample = tl.load(
        key_ptr + sampled[:, None] * stride_s + columns[None, :] * stride_d,
        mask=is_column[None, :],
        other=0.0,
    )
    return tl.sum(sample.to(tl.float32), axis=0) / SAMPLE
