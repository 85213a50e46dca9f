"""Keys that queries see: the range of keys of a tile, and the terms that a mask adds to scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.options import AttentionOptions
from attention_kernels.tiles.online_softmax import LOG2_E

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
"""Largest float32 number. A mask value of -finfo.max must stay finite when it is converted to base
2."""


@triton.jit
def may_see(diagonals, keys, k_end, left, right, IS_CAUSAL: tl.constexpr):
    """Return whether each query sees each key, (M, N).

    Args:
        diagonals: (M,), the diagonal keys of the queries.
        keys: (N,); no query sees keys from `k_end` on.
        left, right: sides of a window, in keys before and after the diagonal; None for all.
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
    """Return the first key of a tile, the first key of the blocks that all rows see in full, the
    end of these blocks, and the end of the tile's keys.

    Whole blocks follow the blocks that a window's left side cuts. `diagonal` is the diagonal key of
    the tile's first row. With IS_ALIGNED, every block begins at a multiple of BLOCK_N from
    `k_start`, and the first may begin before the window.
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
            first = k_start + (first - k_start) // BLOCK_N * BLOCK_N
        unmasked -= first - k_start
    cut = first + tl.maximum(unmasked, 0) // BLOCK_N * BLOCK_N
    whole = first
    if left is not None:
        # After the first `begun` keys, every row's window has begun.
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
    """Return the terms that a mask adds to scores in base 2: (M, N), or (1, N) if all rows share
    them.

    Triton loads 16 bytes at once only if all of them are needed under the same condition. Rows past
    the end therefore read the last row, and keys end at a multiple of UNIT (`mask_unit`). The
    values of these rows and keys are meaningless.
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
    """Multiply a mask's float32 values by log₂e. Only -inf becomes -inf, so that a row that
    contains only -finfo.max is treated like any other row."""
    scaled = tl.maximum(values * LOG2_E, -LARGEST)
    is_ordinary = (values != float("-inf")) & (values == values)
    return tl.where(is_ordinary, scaled, values)


def window_sides(
    is_causal: bool, options: AttentionOptions, q_len: int, k_len: int
) -> tuple[bool, int | None, int | None]:
    """Return whether a call is causal, and the two sides of its window; None for a side without a
    limit."""
    left, right = (
        None if side is None or side >= q_len + k_len else side for side in options.window
    )
    if is_causal or right == 0:
        return True, left, None
    return False, left, right


def mask_unit(mask: Tensor) -> int:
    """Return the number of elements of a mask (B, Hq, Sq, Sk) that are loaded at once.

    The unit is 16 bytes if the length and the strides of the rows are multiples of 16 bytes, else 1
    element.
    """
    unit = 16 // mask.element_size()
    fits = all(number % unit == 0 for number in (*mask.stride()[:3], mask.shape[3]))
    return unit if fits and mask.stride(3) == 1 else 1
