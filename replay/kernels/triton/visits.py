"""Which blocks of keys a mask leaves to each tile of queries, so that the others are not read.

A block is gone through without the mask if it hides nothing and adds nothing there, with it if it
does so for some, and not at all if it hides all of it. The mask is read once for that. What comes
out depends on nothing but the mask: a model's layers and steps can share it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replay.kernels.triton.launch import Launch, named
from replay.kernels.triton.masking import mask_unit

HIDDEN = tl.constexpr(-1e30)
"""A key to which no more is added has no weight beside any of its row with more: some models add
-finfo.max where others add -inf. A row of such keys alone is an ordinary row."""


class Visits(NamedTuple):
    """The blocks that each tile goes through. B and H are 1 where the mask is the same for all."""

    blocks: Tensor
    """(B, H, tiles, 2, blocks) int32, the first key of each: those without the mask, and those with
    it, in order; what follows them is undefined."""
    counts: Tensor
    """(B, H, tiles, 2) int32: how many there are of each."""

    def strides(self) -> tuple[int, int]:
        """From one batch element to the next, and from one head to the next, in tiles."""
        batches, heads, tiles = self.counts.shape[:3]
        return (heads * tiles if batches > 1 else 0), (tiles if heads > 1 else 0)


@triton.jit(do_not_specialize=["heads", "q_len", "k_len"])
def _visits_kernel(
    mask_ptr,
    blocks_ptr,
    counts_ptr,
    heads,
    q_len,
    k_len,
    stride_b,
    stride_h,
    stride_m,
    stride_n,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_BOOL: tl.constexpr,
):
    """One tile of queries; loads as those of `masking.mask_bias`."""
    tile, head = tl.program_id(0), tl.program_id(1)
    width = tl.cdiv(k_len, BLOCK_N)
    place = head.to(tl.int64) * tl.num_programs(0) + tile
    blocks_ptr += place * 2 * width
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows[:, None] < q_len
    mask_ptr += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    row_ptrs = mask_ptr + tl.minimum(rows, q_len - 1)[:, None].to(tl.int64) * stride_m
    end = tl.cdiv(k_len, UNIT) * UNIT
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if not IS_BOOL:
        for first in range(0, k_len, BLOCK_N):
            keys = first + tl.arange(0, BLOCK_N)
            places = row_ptrs + keys[None, :].to(tl.int64) * stride_n
            values = tl.load(places, mask=keys[None, :] < end, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(values.to(tl.float32), axis=1))
    has_more = largest[:, None] > HIDDEN
    whole = 0
    cut = 0
    for first in range(0, k_len, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        places = row_ptrs + keys[None, :].to(tl.int64) * stride_n
        values = tl.load(places, mask=keys[None, :] < end, other=0)
        if IS_BOOL:
            is_seen = values != 0
            is_plain = is_seen
        else:
            is_hidden = (values <= HIDDEN) & (has_more | (values == float("-inf")))
            is_seen = is_hidden == 0  # NaN too
            is_plain = values == 0
        inside = is_row & (keys[None, :] < k_len)
        is_visited = tl.max((is_seen & inside).to(tl.int32)) == 1
        is_whole = tl.min((is_plain | ~is_row).to(tl.int32)) == 1
        is_whole = is_whole & (first + BLOCK_N <= k_len)
        is_cut = is_visited & (is_whole == 0)
        tl.store(blocks_ptr + whole, first, mask=is_whole)
        tl.store(blocks_ptr + width + cut, first, mask=is_cut)
        whole += is_whole.to(tl.int32)
        cut += is_cut.to(tl.int32)
    tl.store(counts_ptr + place * 2, whole)
    tl.store(counts_ptr + place * 2 + 1, cut)


@triton.jit
def first_key(blocks, place, last, BLOCK_N: tl.constexpr):
    """The first key of a block, as a number that Triton knows to be a multiple; 0 past the last.

    To be asked a block ahead: loads are not begun early whose place is loaded in the same turn.
    """
    return tl.multiple_of(tl.load(blocks + place, mask=place < last, other=0), BLOCK_N)


def visits(attn_mask: Tensor, rows: int, keys: int) -> Visits:
    """What a mask (B, Hq, Sq, Sk), bool or float, any strides, leaves to tiles of `rows` queries,
    of blocks of `keys` keys."""
    shared = [dim for dim in (0, 1) if attn_mask.stride(dim) == 0]
    for dim in shared:
        attn_mask = attn_mask.narrow(dim, 0, min(1, attn_mask.shape[dim]))
    batches, heads, q_len, k_len = attn_mask.shape
    is_bool = attn_mask.dtype == torch.bool
    numbers = attn_mask.view(torch.uint8) if is_bool else attn_mask
    tiles = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    blocks = attn_mask.new_empty((batches, heads, tiles[0], 2, tiles[1]), dtype=torch.int32)
    counts = attn_mask.new_empty((batches, heads, tiles[0], 2), dtype=torch.int32)
    unit = mask_unit(numbers)
    plan = _planned(
        numbers.shape, numbers.stride(), attn_mask.dtype, numbers.device, unit, rows, keys
    )
    plan(numbers, blocks, counts)
    return Visits(blocks, counts)


@functools.lru_cache(maxsize=1024)
def _planned(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    unit: int,
    rows: int,
    keys: int,
) -> Launch:
    """The launch for masks of one shape; `dtype` is theirs before bool became bytes."""
    batches, heads, q_len, k_len = shape
    return Launch(
        _visits_kernel,
        (triton.cdiv(q_len, rows), batches * heads, 1),
        device,
        named("stride_", "bhmn", strides)
        | {
            "heads": heads,
            "q_len": q_len,
            "k_len": k_len,
            "UNIT": unit,
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "IS_BOOL": dtype == torch.bool,
        },
        num_warps=4,
    )
