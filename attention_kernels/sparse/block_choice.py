"""Choice of the blocks of keys that each tile of queries attends to, for `block_sparse_attention`.

`block_policy.py` describes the policies. The choice by pooled scores takes three launches: the
means of queries and keys, their products (a matrix product of PyTorch), and the lists of blocks.
The means take most of the time, because they read query and key. A window depends on the shape
alone, and its lists are kept for later calls.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.launcher import Launch, PlanCache, layout, named
from attention_kernels.launch.shape_checks import check_types
from attention_kernels.sparse.block_policy import (
    SAMPLES,
    BlockPolicy,
    check_choice,
    visible_blocks,
    window_blocks,
)
from attention_kernels.sparse.block_sparse import block_sizes
from attention_kernels.tiles.visited_blocks import (
    CUT,
    WHOLE,
    VisitedBlocks,
    empty_lists,
    list_blocks,
    store_lists,
)

FIRST, LOWEST = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))
"""Ranks of blocks that are always kept and of blocks that no query sees."""


@triton.jit(do_not_specialize=["q_len", "k_len", "q_heads", "kv_heads", "tiles", "blocks"])
def _means_kernel(
    query,
    key,
    q_means,
    k_means,
    q_len,
    k_len,
    q_heads,
    kv_heads,
    tiles,
    blocks,
    q_programs,
    head_dim,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the mean of one tile of queries or of one block of keys."""
    program = tl.program_id(0)
    if program < q_programs:
        _store_mean(
            query, q_means, program, tiles, q_heads, q_len, head_dim,
            stride_qb, stride_qh, stride_qm, stride_qd, ROWS, SAMPLES, BLOCK_D,
        )  # fmt: skip
    else:
        _store_mean(
            key, k_means, program - q_programs, blocks, kv_heads, k_len, head_dim,
            stride_kb, stride_kh, stride_kn, stride_kd, KEYS, SAMPLES, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _store_mean(
    source,
    means,
    number,
    runs,
    heads,
    length,
    head_dim,
    stride_batch,
    stride_head,
    stride_row,
    stride_dim,
    RUN: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the mean of run `number` of RUN rows, counted over all heads and batch elements."""
    STEP: tl.constexpr = (RUN + SAMPLES - 1) // SAMPLES
    head, run = number // runs, number % runs
    source += (head // heads).to(tl.int64) * stride_batch
    source += (head % heads).to(tl.int64) * stride_head
    sample = tl.arange(0, SAMPLES) * STEP
    rows = run * RUN + sample
    is_row = (sample < RUN) & (rows < length)
    dims = tl.arange(0, BLOCK_D)
    values = tl.load(
        source + rows.to(tl.int64)[:, None] * stride_row + dims.to(tl.int64)[None, :] * stride_dim,
        mask=is_row[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    )
    mean = tl.sum(values.to(tl.float32), 0) / tl.sum(is_row.to(tl.float32))
    tl.store(means + number.to(tl.int64) * head_dim + dims, mean, mask=dims < head_dim)


@triton.jit(do_not_specialize=["heads", "tiles", "width", "k_len"])
def _choice_kernel(
    scores,
    limits,
    blocks_ptr,
    counts_ptr,
    scale,
    heads,
    tiles,
    width,
    k_len,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_MASS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """List the blocks that one tile keeps, as `block_policy.kept_blocks` chooses them.

    The rank of the last block kept is found bit by bit: the largest rank for which the blocks of
    this rank or more reach the limit. Of blocks with equal ranks, the first are kept.
    """
    place = tl.program_id(0)
    blocks = tl.arange(0, WIDTH)
    first_key = blocks * KEYS
    is_block = blocks < width
    count = tl.minimum(k_len - first_key, KEYS)
    is_seen = is_block
    is_cut = is_block & (count < KEYS)
    is_fixed = blocks < 0
    if IS_CAUSAL:
        first_query = place % tiles * ROWS
        is_seen = is_block & (first_key < first_query + ROWS)
        is_fixed = is_seen & (first_key + count - 1 > first_query)
        is_cut = is_cut | is_fixed
    wide = place.to(tl.int64)
    score = tl.load(scores + wide * width + blocks, mask=is_seen, other=0.0) * scale
    score = tl.where(is_seen, score + tl.log(tl.maximum(count, 1).to(tl.float32)), float("-inf"))
    limit = tl.load(limits + place // tiles % heads)
    weights = is_seen.to(tl.float32)
    if BY_MASS:
        weights = tl.exp(score - tl.max(score, 0))
        weights = weights / tl.sum(weights, 0)
    else:
        limit = tl.maximum(tl.floor(limit * tl.sum(weights, 0) + 0.5), 1.0)

    # The bits of a float, as an integer with the same order.
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ FIRST, bits)
    rank = tl.where(is_fixed, FIRST, tl.where(is_seen, rank, LOWEST))
    last = tl.where(_reaches(rank, 0, weights, limit), 0, LOWEST)
    for i in range(31):
        candidate = last + (1 << (30 - i))
        last = tl.where(_reaches(rank, candidate, weights, limit), candidate, last)
    is_level = is_seen & (rank == last)
    level = tl.where(is_level, weights, 0.0)
    missing = limit - tl.sum(tl.where(rank > last, weights, 0.0), 0)
    is_kept = (rank > last) | (is_level & (tl.cumsum(level, 0) - level < missing)) | is_fixed
    kinds = tl.where(is_kept, tl.where(is_cut, CUT, WHOLE), 0)
    store_lists(kinds, blocks_ptr, counts_ptr, wide, width, KEYS, WIDTH)


@triton.jit
def _reaches(rank, least, weights, limit):
    """Return whether the blocks with a rank of at least `least` reach the limit."""
    return tl.sum(tl.where(rank >= least, weights, 0.0), 0) >= limit


def choose_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: BlockPolicy,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> VisitedBlocks:
    """Return the blocks that a policy keeps, for `block_sparse_attention` of the same tensors.

    Args:
        query, key, value, is_causal, scale: as for `block_sparse_attention`.

    Raises:
        TypeError, ValueError: as for `check_choice`.
    """
    check_choice(query, key, value, policy, is_causal=is_causal)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1:3]
    rows, keys = block_sizes(query, key, value)
    if policy.window is not None:
        return _lists_of_window(policy, q_len, k_len, rows, keys, query.device)
    tiles, blocks = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    visited = empty_lists((batch, heads, tiles, blocks), query.device)
    if not visited.blocks.numel():
        return visited
    scale = head_dim**-0.5 if scale is None else scale
    shape = (
        query.device,
        layout(query),
        layout(key),
        rows,
        keys,
        policy.is_by_mass,
        is_causal,
        scale,
    )
    store_means, choose = _launches.get(shape) or _launches.keep(
        shape, _plan(query, key, rows, keys, policy.is_by_mass, is_causal, scale)
    )
    # The tiles of the heads that share a key head are the rows of one product.
    in_group = heads // kv_heads * tiles
    q_means, k_means = (
        torch.empty((batch, kv_heads, count, head_dim), dtype=torch.float32, device=query.device)
        for count in (in_group, blocks)
    )
    store_means(query, key, q_means, k_means)
    choose(q_means @ k_means.mT, _limits(policy, heads, query.device), *visited)
    return visited


_launches: PlanCache[tuple[Launch, Launch]] = PlanCache()


def _plan(
    query: Tensor,
    key: Tensor,
    rows: int,
    keys: int,
    is_by_mass: bool,
    is_causal: bool,
    scale: float,
) -> tuple[Launch, Launch]:
    """Return the launches of `_means_kernel` and `_choice_kernel` for calls of one shape."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1:3]
    tiles, blocks = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    width = triton.next_power_of_2(blocks)
    store_means = Launch(
        _means_kernel,
        (batch * (heads * tiles + kv_heads * blocks), 1, 1),
        query.device,
        named("stride_q", "bhmd", query.stride())
        | named("stride_k", "bhnd", key.stride())
        | {
            "q_len": q_len,
            "k_len": k_len,
            "q_heads": heads,
            "kv_heads": kv_heads,
            "tiles": tiles,
            "blocks": blocks,
            "q_programs": batch * heads * tiles,
            "head_dim": head_dim,
            "ROWS": rows,
            "KEYS": keys,
            "SAMPLES": SAMPLES,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        },
        num_warps=4,
    )
    choose = Launch(
        _choice_kernel,
        (batch * heads * tiles, 1, 1),
        query.device,
        {
            "scale": scale,
            "heads": heads,
            "tiles": tiles,
            "width": blocks,
            "k_len": k_len,
            "ROWS": rows,
            "KEYS": keys,
            "WIDTH": width,
            "BY_MASS": is_by_mass,
            "IS_CAUSAL": is_causal,
        },
        num_warps=1 if width <= 512 else 4,
    )
    return store_means, choose


@functools.lru_cache(maxsize=1024)
def _limits(policy: BlockPolicy, heads: int, device: torch.device) -> Tensor:
    return torch.tensor(policy.limits(heads), dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _lists_of_window(
    policy: BlockPolicy, q_len: int, k_len: int, rows: int, keys: int, device: torch.device
) -> VisitedBlocks:
    kept = window_blocks(policy, q_len, k_len, rows, keys, device)
    return _listed(kept, q_len, k_len, rows, keys, False)


def visited_of(
    kept: Tensor, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False
) -> VisitedBlocks:
    """Return a map of blocks as lists for `block_sparse_attention` of the same tensors.

    Args:
        kept: bool (B or 1, Hq or 1, ⌈Sq / rows⌉, ⌈Sk / keys⌉) for the sizes of `block_sizes`, True
            for blocks to attend to. In a causal call, blocks that no query of a tile sees are
            skipped.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes do not fit together, or the map is not bool, has another shape, or
            leaves a query without a key.
    """
    check_types({"kept": kept})
    if kept.dtype != torch.bool:
        raise ValueError(f"kept in {kept.dtype}: needs bool, for example kept > 0")
    rows, keys = block_sizes(query, key, value)
    q_len, k_len = query.shape[2], key.shape[2]
    tiles, blocks = triton.cdiv(q_len, rows), triton.cdiv(k_len, keys)
    if kept.ndim != 4 or tuple(kept.shape[2:]) != (tiles, blocks):
        raise ValueError(
            f"kept of shape {tuple(kept.shape)}: needs (batch, heads, {tiles} tiles, {blocks} "
            "blocks) for the sizes of `block_sizes`"
        )
    seen_by_all = kept
    if is_causal:
        first_query = torch.arange(0, q_len, rows, device=kept.device)[:, None]
        seen_by_all = kept & (torch.arange(0, k_len, keys, device=kept.device) <= first_query)
    if not bool(seen_by_all.any(dim=3).all()):
        raise ValueError("the map leaves a query without a key: keep a block that all queries see")
    return _listed(kept, q_len, k_len, rows, keys, is_causal)


def _listed(
    kept: Tensor, q_len: int, k_len: int, rows: int, keys: int, is_causal: bool
) -> VisitedBlocks:
    seen, is_cut = visible_blocks(q_len, k_len, rows, keys, is_causal, kept.device)
    if k_len % keys:
        is_cut[:, -1] = seen[:, -1]
    kinds = torch.where(is_cut, CUT.value, WHOLE.value) * (kept & seen)
    return list_blocks(kinds.to(torch.int8).contiguous(), keys)


def map_of(visited: VisitedBlocks, keys: int) -> Tensor:
    """Return the map of the visited blocks, bool (B or 1, H or 1, tiles, blocks); `keys` is the
    size of a block."""
    width = visited.blocks.shape[4]
    is_listed = torch.arange(width, device=visited.blocks.device) < visited.counts[..., None]
    places = torch.where(is_listed, visited.blocks // keys, width)
    kept = places.new_zeros((*visited.counts.shape[:3], width + 1), dtype=torch.bool)
    return kept.scatter_(3, places.flatten(3).long(), True)[..., :width]
