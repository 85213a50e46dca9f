"""FP8 numbers as operands of products in float16, loaded as pairs.

Tensor cores take registers of two float16 numbers that follow each other along the summed
dimension. A GPU moves 16 bits but not single bytes to the threads that need them, and it converts
two neighbouring bytes of a register at once. Keys and values are therefore loaded as int16, each
holding the numbers of two neighbouring columns, and are moved to their threads as such. A tile of
pairs becomes two tiles in float16 with half as many columns each:

- `even_columns` and `odd_columns`, for values, whose columns are the columns of the output;
- `first_halves` and `second_halves`, for keys: of each four columns, the first two or the last two.
  The columns are summed, so it is enough that the query is divided in the same way
  (`halves_of_query`). This costs no instruction beside the conversion.

Float16 holds every FP8 number exactly. A query in bfloat16 may exceed its range, so each row is
divided by a power of two (`row_units`), by which its scores are then multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.tiles.matmul import INTERPRETED


@triton.jit
def row_units(query):
    """Return a power of two for each row of `query` (M, D), float32.

    Divided by it, the row's largest number is between 2^14 and 2^15, and numbers lose nothing
    unless they are below 2^-28 of the largest.
    """
    largest = tl.max(tl.abs(query.to(tl.float32)), axis=1)
    exponents = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 15)
    return ((exponents - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_units(query, units):
    """Return the rows of `query` (M, D) divided by powers of two (M,), in float16."""
    inverses = ((254 << 23) - units.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return (query.to(tl.float32) * inverses[:, None]).to(tl.float16)


@triton.jit
def halves_of_query(query, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first two and the last two of each four columns: (ROWS, COLUMNS // 2) each."""
    first, second = query.reshape(ROWS, COLUMNS // 4, 2, 2).permute(0, 1, 3, 2).split()
    return first.reshape(ROWS, COLUMNS // 2), second.reshape(ROWS, COLUMNS // 2)


@triton.jit
def first_halves(pairs, IS_E5M2: tl.constexpr):
    """Return the first two of each four numbers of a row, float16; `pairs` is (N, D / 2) int16."""
    if INTERPRETED:
        result = _half(pairs, 0, IS_E5M2)
    elif IS_E5M2:
        result = _in_float16("prmt.b32 $0, $1, 0, 0x1404;", pairs)
    else:
        result = _in_float16(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }", pairs
        )
    return result


@triton.jit
def second_halves(pairs, IS_E5M2: tl.constexpr):
    """Return the last two of each four numbers of a row, float16; `pairs` is (N, D / 2) int16."""
    if INTERPRETED:
        result = _half(pairs, 1, IS_E5M2)
    elif IS_E5M2:
        result = _in_float16("prmt.b32 $0, $1, 0, 0x3424;", pairs)
    else:
        result = _in_float16(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, h; }", pairs
        )
    return result


@triton.jit
def even_columns(pairs, IS_E5M2: tl.constexpr):
    """Return the first number of each pair, float16."""
    if INTERPRETED:
        result = _single(pairs & 0xFF, IS_E5M2)
    elif IS_E5M2:
        result = _in_float16("prmt.b32 $0, $1, 0, 0x2404;", pairs)
    else:
        result = _in_float16(
            "{ .reg .b16 l, h; .reg .b32 r; prmt.b32 r, $1, 0, 0x4420; mov.b32 {l, h}, r; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }",
            pairs,
        )
    return result


@triton.jit
def odd_columns(pairs, IS_E5M2: tl.constexpr):
    """Return the second number of each pair, float16."""
    if INTERPRETED:
        result = _single(pairs >> 8, IS_E5M2)
    elif IS_E5M2:
        result = _in_float16("and.b32 $0, $1, 0xff00ff00;", pairs)
    else:
        result = _in_float16(
            "{ .reg .b16 l, h; .reg .b32 r; prmt.b32 r, $1, 0, 0x4431; mov.b32 {l, h}, r; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }",
            pairs,
        )
    return result


@triton.jit
def _in_float16(CODE: tl.constexpr, pairs):
    """Convert two pairs, a register, with PTX. In all layouts that Triton chooses for loads and for
    operands, two pairs of a register are neighbours along the row or along the summed dimension."""
    return tl.inline_asm_elementwise(CODE, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _half(pairs, WHICH: tl.constexpr, IS_E5M2: tl.constexpr):
    first, second = pairs.reshape(pairs.shape[0], pairs.shape[1] // 2, 2).split()
    pair = second if WHICH else first
    both = tl.join(_single(pair & 0xFF, IS_E5M2), _single(pair >> 8, IS_E5M2))
    return both.reshape(pairs.shape[0], pairs.shape[1])


@triton.jit
def _single(bits, IS_E5M2: tl.constexpr):
    dtype: tl.constexpr = tl.float8e5 if IS_E5M2 else tl.float8e4nv
    return bits.to(tl.uint8).to(dtype, bitcast=True).to(tl.float16)
