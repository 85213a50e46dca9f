"""Products with 8-bit numbers whose other operand is finer than 8 bits.

The tensor cores take two operands of one type. So that a cache need not be converted to 16 bits,
number by number, what it is multiplied with is split into two numbers of its type, high and low:
two columns of one product, added afterwards.

    INT8          x = 128 · high + low, an integer of 14 bits and a sign
    FP8 (e4m3)    x ≈ high + low, where low is what high was rounded by

An e4m3 number has 4 bits, two of them at least 8: x is rounded by at most 2⁻⁸ of it, or by 2⁻¹⁸ of
the largest that is taken where low is too small to have 4. The cache was rounded by up to 2⁻⁴.

Rows of the tensor cores' product are the cache's numbers, of which a warp group of Hopper takes 64,
and its columns the halves of a few queries, of which it takes 16 or more. If queries were the rows,
most would be empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.eight_bits import round_to_fp8
from attention_kernels.tiles.matmul import INTERPRETED

LOG2_LARGEST_INT8 = tl.constexpr(13.9999)
"""Of the largest number that `high_low_parts` takes: 2¹⁴ would be 128 · 128."""
LOG2_LARGEST_FP8 = tl.constexpr(8.0)
_ROUNDS = tl.constexpr(1.5 * 2**23)
"""A float32 number that has integers for its last bits: adding it rounds to them."""


@triton.jit
def high_low_parts(numbers, IS_INT8: tl.constexpr):
    """(M, N) float32, as (2M, N) 8-bit numbers: the high halves of row m are row 2m, the low ones
    row 2m + 1. None is larger than 2 ** `LOG2_LARGEST_INT8` or `LOG2_LARGEST_FP8`."""
    if IS_INT8:
        integers = (numbers + _ROUNDS).to(tl.int32, bitcast=True)
        high = (integers >> 7).to(tl.int8)
        low = (integers & 127).to(tl.int8)
    else:
        # Rounded to 3 bits behind the first by arithmetic of the number's bits, not by converting
        # high back: where four of them share a register, ptxas 12.8 converts another register's.
        bits = numbers.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
        high = round_to_fp8(rounded)
        low = round_to_fp8(numbers - rounded)
    pairs = tl.join(high, low).permute(0, 2, 1)
    return pairs.reshape(2 * numbers.shape[0], numbers.shape[1])


@triton.jit
def high_low_product(halves, numbers):
    """left · rightᵀ, (M, N) in float32, with left (M, K) as `high_low_parts` (2M, K) and right (N,
    K) in the same 8-bit type.

    FP8 products are added with 14 bits or so (`quantised_prefill_kernel.py`): each starts at zero,
    and K is short.
    """
    is_int8: tl.constexpr = numbers.dtype == tl.int8
    if INTERPRETED:
        halves = halves.to(tl.float32)
        numbers = numbers.to(tl.float32)
    products = tl.trans(tl.dot(numbers, tl.trans(halves), input_precision="ieee"))
    pairs = products.reshape(products.shape[0] // 2, 2, products.shape[1])
    high, low = tl.split(pairs.permute(0, 2, 1))
    return (high * 128 + low).to(tl.float32) if is_int8 else high + low
