"""Which keys a query sees, where a tile's begin and end, and what a mask adds to scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.options import AttentionOptions
from attention_kernels.tiles.online_softmax import LOG2_E

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
"""The largest float32: what a mask of -finfo.max must not leave when it is turned to base 2."""


@triton.jit
def may_see(diagonals, keys, k_end, left, right, IS_CAUSAL: tl.constexpr):
    """(M, N): whether a query sees a key.

    Args:
        diagonals: (M,), the keys beside the queries.
        keys: (N,), of which those from `k_end` on are nobody's.
        left, right: sides of a window, keys before and after the diagonal; None for all.
    """
    seen = keys[None, :] < k_end
    if IS_CAUSAL:
        seen = seen & (keys[None, :] <= diagonals[:, None])
    if right is not None:
        seen = seen & (keys[None, :] <= diagonals[:, None] + right)
    if left is not None:
        seen = seen & (keys[None, :] >= diagonals[:, None] - left)
    return seen


@triton.jit
def stretches(
    diagonal,
    k_start,
    k_end,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """The keys of a tile: where they begin, where blocks begin that all rows see whole (after those
    that a window's left side cuts), where these end, and where all keys end.

    `diagonal` is the key beside the tile's first row. IS_ALIGNED: every block begins at a multiple
    of BLOCK_N, the first may be one of keys before the window; `k_start` must be such a multiple.
    """
    first = k_start
    last = k_end
    unmasked = k_end - k_start
    if IS_CAUSAL:
        last = tl.minimum(k_end, diagonal + BLOCK_M)
        unmasked = tl.minimum(unmasked, diagonal + 1 - k_start)
    if right is not None:
        last = tl.minimum(k_end, diagonal + BLOCK_M + right)
        unmasked = tl.minimum(unmasked, diagonal + 1 + right - k_start)
    if left is not None:
        first = tl.maximum(k_start, diagonal - left)
        if IS_ALIGNED:
            first = first // BLOCK_N * BLOCK_N
        unmasked -= first - k_start
    cut = first + tl.maximum(unmasked, 0) // BLOCK_N * BLOCK_N
    whole = first
    if left is not None:
        # From here on no row's window has yet to begin.
        begun = tl.maximum(diagonal + BLOCK_M - 1 - left - first, 0)
        whole = tl.minimum(first + tl.cdiv(begun, BLOCK_N) * BLOCK_N, tl.maximum(first, last))
        cut = tl.maximum(cut, whole)
    return first, whole, cut, last


@triton.jit
def mask_bias(
    attn_mask,
    rows,
    keys,
    q_end,
    k_end,
    stride_row,
    stride_key,
    UNIT: tl.constexpr,
    IS_BOOL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """What a mask adds to scores in base 2: (M, N), or (1, N) where all rows share it.

    Triton loads 16 bytes at once only if it can tell that they are asked for together: rows past
    the end take the last one's, and keys end at a multiple of UNIT (`mask_unit`). What is found for
    those that are nobody's means nothing.
    """
    pointers = attn_mask + keys.to(tl.int64)[None, :] * stride_key
    if HAS_ROWS:
        pointers += tl.minimum(rows, q_end - 1).to(tl.int64)[:, None] * stride_row
    if IS_BOUNDED:
        inside = keys[None, :] < tl.cdiv(k_end, UNIT) * UNIT
        values = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    else:
        values = tl.load(pointers).to(tl.float32)
    return tl.where(values != 0, 0.0, float("-inf")) if IS_BOOL else in_base_2(values)


@triton.jit
def in_base_2(values):
    """Float32 numbers of a mask times log₂e, of which only -inf becomes -inf: a row of -finfo.max
    alone is an ordinary row."""
    scaled = tl.maximum(values * LOG2_E, -LARGEST)
    is_ordinary = (values != float("-inf")) & (values == values)
    return tl.where(is_ordinary, scaled, values)


def window_sides(
    is_causal: bool, options: AttentionOptions, q_len: int, k_len: int
) -> tuple[bool, int | None, int | None]:
    """Whether a call is causal, and the sides of its window beside that; None where one leaves
    nothing out."""
    left, right = (
        None if side is None or side >= q_len + k_len else side for side in options.window
    )
    if is_causal or right == 0:
        return True, left, None
    return False, left, right


def mask_unit(mask: Tensor) -> int:
    """How many elements of a mask (B, Hq, Sq, Sk) are 16 bytes, which are loaded at once where its
    rows are a multiple long and apart; else 1."""
    unit = 16 // mask.element_size()
    fits = all(number % unit == 0 for number in (*mask.stride()[:3], mask.shape[3]))
    return unit if fits and mask.stride(3) == 1 else 1
