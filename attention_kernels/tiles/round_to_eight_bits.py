"""Rounding to INT8 and FP8 (e4m3), and the mean that is subtracted from keys beforehand."""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.matmul import INTERPRETED

SMALLEST_MAXIMUM = tl.constexpr(1e-12)
"""Threshold for the largest magnitude in a group: a group below the threshold becomes zeros, so
that its scale does not underflow."""

INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)
"""Largest e4m3 number."""
LOG2_FP8_MAX = tl.constexpr(8.8073549)
"""Base-2 logarithm of the largest e4m3 number, rounded down."""

SAMPLE = tl.constexpr(64)
"""Number of keys whose mean is subtracted: one from each of 64 equal parts of the sequence."""
SAMPLE_STEP = tl.constexpr(39)
"""Step between the positions of the sampled keys in successive parts, in 64ths of a part.

39/64 is near the golden ratio, so that a pattern that recurs in the sequence, like the columns of
an image, is not sampled at the same phase each time.
"""


@triton.jit
def to_int8(x, largest):
    """Return x / largest · 127, rounded to the nearest INT8 number."""
    return tl.floor(x * (1.0 / largest) * INT8_MAX + 0.5).to(tl.int8)


@triton.jit
def round_to_fp8(x):
    """Round x, at most 448 in magnitude, to the nearest e4m3 number."""
    if INTERPRETED:
        # Triton's interpreter halves numbers that round up to a power of two, so the rounding is
        # done here.
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 1e-9))), -6.0)
        step = tl.exp2(exponent - 3)
        x = tl.minimum(tl.maximum(tl.floor(x / step + 0.5) * step, -FP8_MAX), FP8_MAX)
    return x.to(tl.float8e4nv)


@triton.jit
def to_fp8(x, largest):
    """Return x / largest · 448, rounded to the nearest e4m3 number."""
    return round_to_fp8(x * (1.0 / largest) * FP8_MAX)


@triton.jit
def sampled_mean(key_ptr, stride_s, stride_d, columns, is_column, kv_len):
    """Return the mean (D,) of `SAMPLE` of a head's first `kv_len` keys.

    `key_ptr` points to the head. Columns beyond the head dimension are not read; their mean is
    zero.
    """
    part = tl.arange(0, SAMPLE)
    place = (part * SAMPLE + part * SAMPLE_STEP % SAMPLE).to(tl.int64)
    sampled = place * kv_len // (SAMPLE * SAMPLE)
    sample = tl.load(
        key_ptr + sampled[:, None] * stride_s + columns[None, :] * stride_d,
        mask=is_column[None, :],
        other=0.0,
    )
    return tl.sum(sample.to(tl.float32), axis=0) / SAMPLE
