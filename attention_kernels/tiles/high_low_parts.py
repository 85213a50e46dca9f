"""Products of 8-bit numbers with more precise numbers, which are split into two 8-bit parts.

The tensor cores take two operands of one type, so an 8-bit cache would have to be converted to 16
bits. Instead, each number of the other operand is split into two numbers of the cache's type. The
two parts are columns of one product, and their results are added.

    INT8          x = 128 · high + low, an integer of 14 bits and a sign
    FP8 (e4m3)    x ≈ high + low, where low is the rounding error of high

An e4m3 number has 4 significant bits, and two such numbers together have at least 8. The rounding
error of x is therefore at most 2⁻⁸ of x, or 2⁻¹⁸ of the largest number if low is subnormal. The
rounding error of the cache is up to 2⁻⁴.

The rows of the tensor cores' product are the tokens of the cache (64 for a warp group of Hopper).
The columns are the parts of a few queries (16 or more). If queries were the rows, most rows would
be empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.matmul import INTERPRETED
from attention_kernels.tiles.round_to_eight_bits import round_to_fp8

LOG2_LARGEST_INT8 = tl.constexpr(13.9999)
"""Base-2 logarithm of the largest INT8 operand of `high_low_parts`; 2¹⁴ would need a high part of
128."""
LOG2_LARGEST_FP8 = tl.constexpr(8.0)
_ROUNDS = tl.constexpr(1.5 * 2**23)
"""Float32 number whose last bit has the value 1: adding it to another number rounds that number to
an integer."""


@triton.jit
def high_low_parts(numbers, IS_INT8: tl.constexpr):
    """Split (M, N) float32 numbers into (2M, N) 8-bit numbers.

    The high part of row m is row 2m, the low part row 2m + 1. No magnitude may exceed 2 **
    `LOG2_LARGEST_INT8` or 2 ** `LOG2_LARGEST_FP8`.
    """
    if IS_INT8:
        integers = (numbers + _ROUNDS).to(tl.int32, bitcast=True)
        high = (integers >> 7).to(tl.int8)
        low = (integers & 127).to(tl.int8)
    else:
        # High is rounded to 4 significant bits by arithmetic on the bits of the number. Converting
        # high back would be simpler, but ptxas 12.8 converts the wrong register if four numbers
        # share one.
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
        high = round_to_fp8(rounded)
        low = round_to_fp8(numbers - rounded)
    pairs = tl.join(high, low).permute(0, 2, 1)
    return pairs.reshape(2 * numbers.shape[0], numbers.shape[1])


@triton.jit
def high_low_product(halves, numbers):
    """Return left · rightᵀ, (M, N) in float32. `halves` (2M, K) are the `high_low_parts` of left
    (M, K), and `numbers` (N, K) is right, in the same 8-bit type.

    FP8 products are accumulated with some 14 bits (`quantised_prefill_kernel.py`). These bits are
    enough, because each sum starts at zero and K is small.
    """
    is_int8: tl.constexpr = numbers.dtype == tl.int8
    if INTERPRETED:
        halves = halves.to(tl.float32)
        numbers = numbers.to(tl.float32)
    products = tl.trans(tl.dot(numbers, tl.trans(halves), input_precision="ieee"))
    pairs = products.reshape(products.shape[0] // 2, 2, products.shape[1])
    high, low = tl.split(pairs.permute(0, 2, 1))
    return (high * 128 + low).to(tl.float32) if is_int8 else high + low
