"""Blocks of keys that a mask keeps visible in each tile of queries; other blocks are not read.

A block is visited without the mask if the mask changes none of its scores. A block is visited with
the mask if the mask changes some scores, and skipped if all its scores are masked. One program per
block reads the mask, once for a bool mask and twice for a float mask. A second kernel lists the
blocks. The lists depend only on the mask, so the layers and steps of a model can share them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.launcher import Launch, named
from attention_kernels.tiles.masking import mask_unit

HIDDEN = tl.constexpr(-1e30)
"""Largest float that masks a key, if the key's row has larger mask values.

Such a key has no weight: some models add -finfo.max instead of -inf. In a row that contains only
such keys, no key counts as masked.
"""
CUT, WHOLE = tl.constexpr(1), tl.constexpr(2)
"""Kinds of blocks: CUT blocks need the mask, WHOLE blocks do not. Masked blocks have kind 0."""


class VisitedBlocks(NamedTuple):
    """Blocks that each tile visits. B or H is 1 if all batch elements or heads share the mask."""

    blocks: Tensor
    """(B, H, tiles, 2, blocks) int32, the first key of each block: one list for blocks without the
    mask and one for blocks with the mask, each in order. Later entries are undefined."""
    counts: Tensor
    """(B, H, tiles, 2) int32, the number of blocks in each list."""

    def strides(self) -> tuple[int, int]:
        """Return the strides between batch elements and between heads, in tiles."""
        batches, heads, tiles = self.counts.shape[:3]
        return (heads * tiles if batches > 1 else 0), (tiles if heads > 1 else 0)


@triton.jit(do_not_specialize=["heads", "q_len", "k_len"])
def _kinds_kernel(
    mask_ptr,
    largest_ptr,
    kinds_ptr,
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
    """Store the kind of one block. The mask is loaded as in `masking.mask_bias`."""
    width, tiles = tl.cdiv(k_len, BLOCK_N), tl.cdiv(q_len, BLOCK_M)
    place, block = tl.program_id(0) // width, tl.program_id(0) % width
    head, tile = place // tiles, place % tiles
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows[:, None] < q_len
    mask_ptr += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    row_ptrs = mask_ptr + tl.minimum(rows, q_len - 1)[:, None].to(tl.int64) * stride_m
    is_loaded = keys[None, :] < tl.cdiv(k_len, UNIT) * UNIT
    values = tl.load(row_ptrs + keys[None, :].to(tl.int64) * stride_n, mask=is_loaded, other=0)
    if IS_BOOL:
        is_seen = values != 0
        is_plain = is_seen
    else:
        largest = tl.load(largest_ptr + head.to(tl.int64) * q_len + rows, mask=rows < q_len)
        has_more = (largest[:, None] <= HIDDEN) == 0  # also true for a NaN
        is_hidden = (values <= HIDDEN) & (has_more | (values == float("-inf")))
        is_seen = is_hidden == 0
        is_plain = values == 0
    inside = is_row & (keys[None, :] < k_len)
    is_visited = tl.max((is_seen & inside).to(tl.int32)) == 1
    is_whole = tl.min((is_plain | ~is_row).to(tl.int32)) == 1
    is_whole = is_whole & ((block + 1) * BLOCK_N <= k_len)
    kind = tl.where(is_whole, WHOLE, tl.where(is_visited, CUT, 0))
    tl.store(kinds_ptr + tl.program_id(0).to(tl.int64), kind.to(tl.int8))


@triton.jit(do_not_specialize=["width"])
def _list_kernel(
    kinds_ptr, blocks_ptr, counts_ptr, width, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """List the visited blocks of one tile among its `width` blocks, at most WIDTH."""
    place = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, WIDTH)
    kinds = tl.load(kinds_ptr + place * width + blocks, mask=blocks < width, other=0)
    store_lists(kinds, blocks_ptr, counts_ptr, place, width, BLOCK_N, WIDTH)


@triton.jit
def store_lists(
    kinds, blocks_ptr, counts_ptr, place, width, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the lists of tile number `place`, whose `width` blocks have these kinds (WIDTH,)."""
    blocks = tl.arange(0, WIDTH)
    blocks_ptr += place * 2 * width
    is_whole = (kinds == WHOLE).to(tl.int32)
    is_cut = (kinds == CUT).to(tl.int32)
    tl.store(blocks_ptr + tl.cumsum(is_whole) - 1, blocks * BLOCK_N, mask=is_whole == 1)
    tl.store(blocks_ptr + width + tl.cumsum(is_cut) - 1, blocks * BLOCK_N, mask=is_cut == 1)
    tl.store(counts_ptr + place * 2, tl.sum(is_whole))
    tl.store(counts_ptr + place * 2 + 1, tl.sum(is_cut))


@triton.jit
def first_key(blocks, place, last, BLOCK_N: tl.constexpr):
    """Return the first key of a block, as a number that Triton recognises as a multiple of BLOCK_N;
    0 past the last block.

    Callers look up one block ahead, because Triton does not prefetch a load whose address is loaded
    in the same iteration.
    """
    return tl.multiple_of(tl.load(blocks + place, mask=place < last, other=0), BLOCK_N)


def find_visited_blocks(attn_mask: Tensor, rows: int, keys: int) -> VisitedBlocks:
    """Return the blocks of `keys` keys that a mask (B, Hq, Sq, Sk) keeps visible in tiles of `rows`
    queries.

    The mask is bool or float, with any strides.
    """
    shared = [dim for dim in (0, 1) if attn_mask.stride(dim) == 0]
    for dim in shared:
        attn_mask = attn_mask.narrow(dim, 0, min(1, attn_mask.shape[dim]))
    batches, heads, q_len, k_len = attn_mask.shape
    is_bool = attn_mask.dtype == torch.bool
    numbers = attn_mask.view(torch.uint8) if is_bool else attn_mask
    tiles, width = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    kinds = attn_mask.new_empty((batches, heads, tiles, width), dtype=torch.int8)
    if not kinds.numel():
        return list_blocks(kinds, keys)
    find_kinds = _kinds_launch(
        numbers.shape,
        numbers.stride(),
        attn_mask.dtype,
        numbers.device,
        mask_unit(numbers),
        rows,
        keys,
    )
    find_kinds(numbers, None if is_bool else numbers.amax(3), kinds)
    return list_blocks(kinds, keys)


@functools.lru_cache(maxsize=1024)
def _kinds_launch(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    unit: int,
    rows: int,
    keys: int,
) -> Launch:
    """Return the launch for masks of one shape; `dtype` is the mask's type before bool was
    converted to bytes."""
    batches, heads, q_len, k_len = shape
    tiles, width = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    return Launch(
        _kinds_kernel,
        (width * tiles * batches * heads, 1, 1),
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


def list_blocks(kinds: Tensor, keys: int) -> VisitedBlocks:
    """Return blocks of `keys` keys as lists.

    Args:
        kinds: (B, H, tiles, blocks) int8, contiguous: 0 or the kind of a visited block.
    """
    visited = empty_lists(kinds.shape, kinds.device)
    if kinds.numel():
        _list_launch(kinds.shape, kinds.device, keys)(kinds, *visited)
    return visited


def empty_lists(shape: tuple[int, ...], device: torch.device) -> VisitedBlocks:
    """Return memory for lists of (B, H, tiles, blocks); without blocks, the counts are 0."""
    batches, heads, tiles, width = shape
    blocks = torch.empty((batches, heads, tiles, 2, width), dtype=torch.int32, device=device)
    new = torch.empty if width else torch.zeros
    return VisitedBlocks(blocks, new((batches, heads, tiles, 2), dtype=torch.int32, device=device))


@functools.lru_cache(maxsize=1024)
def _list_launch(shape: tuple[int, int, int, int], device: torch.device, keys: int) -> Launch:
    batches, heads, tiles, width = shape
    return Launch(
        _list_kernel,
        (tiles * batches * heads, 1, 1),
        device,
        {"width": width, "BLOCK_N": keys, "WIDTH": triton.next_power_of_2(width)},
        num_warps=1,
    )
