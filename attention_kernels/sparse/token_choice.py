"""Choice of the tokens that a decode step attends to: the tokens with the highest scores.

A key head keeps the tokens whose score, the largest scale · q·k over its query heads and queries,
is among the highest (top-k attention: Gupta et al. 2021, "Memory-efficient Transformers via Top-k
Attention"). The scores are exact, so this choice is an upper bound on the accuracy of cheaper
estimates (Quest's page bounds, SparQ's channels). This choice is also the most expensive one,
because every key is read. A model that estimates scores computes its own `indices`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache, find_tokens
from attention_kernels.launch.launcher import Launch, PlanCache, layout, named
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.tiles.addresses import steps_to
from attention_kernels.tiles.matmul import matmul

BLOCK_N = 64


@triton.jit(do_not_specialize=["group", "q_len", "kv_len", "stride_table"])
def _score_kernel(
    query_ptr,
    key_ptr,
    allowed_ptr,
    lengths_ptr,
    table_ptr,
    scores_ptr,
    scale,
    kv_heads,
    group,
    q_len,
    kv_len,
    head_dim,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    stride_query_dim,
    stride_key_first,
    stride_key_head,
    stride_key_token,
    stride_key_dim,
    stride_allowed_batch,
    stride_allowed_token,
    stride_table,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = tl.cdiv(kv_len, BLOCK_N)
    batch_head = tl.program_id(0) // blocks
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    dims = tl.arange(0, BLOCK_D)
    has_dim = dims < head_dim
    length = kv_len
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + batch)
    positions = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens, is_valid, slots, first_axis = find_tokens(
        positions, positions < length, batch, length, None, table_ptr, stride_table, PAGE_SIZE
    )
    key_rows = steps_to(first_axis, stride_key_first) + steps_to(slots, stride_key_token)
    key_rows += kv_head.to(tl.int64) * stride_key_head
    key = tl.load(
        key_ptr + key_rows[:, None] + dims.to(tl.int64)[None, :] * stride_key_dim,
        mask=is_valid[:, None] & has_dim[None, :],
        other=0.0,
    )
    best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for first in range(0, group * q_len, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        has_row = rows < group * q_len
        query_rows = batch.to(tl.int64) * stride_query_batch
        query_rows += (kv_head * group + rows // q_len).to(tl.int64) * stride_query_head
        query_rows += (rows % q_len).to(tl.int64) * stride_query_token
        query = tl.load(
            query_ptr + query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_query_dim,
            mask=has_row[:, None] & has_dim[None, :],
            other=0.0,
        )
        nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scores = matmul(query, tl.trans(key), nothing) * scale
        scores = tl.where(has_row[:, None], scores, float("-inf"))
        best = tl.maximum(best, tl.max(scores, axis=0), propagate_nan=tl.PropagateNan.ALL)
    if allowed_ptr is not None:
        place = allowed_ptr + batch.to(tl.int64) * stride_allowed_batch
        place += tokens.to(tl.int64) * stride_allowed_token
        is_valid = is_valid & (tl.load(place, mask=is_valid, other=0) != 0)
    best = tl.where(is_valid, best, float("-inf"))
    row = batch_head.to(tl.int64) * kv_len
    tl.store(scores_ptr + row + positions, best, mask=positions < kv_len)


def choose_tokens(
    query: Tensor,
    key: Tensor,
    keep: float,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the highest-scoring tokens of each key head, (B, Hkv, K) int64, in any order.

    K = max(1, keep · Sk), rounded. A sequence with fewer allowed tokens keeps the same share of its
    allowed tokens, and the remaining entries are -1.

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, any strides.
        key: (B, Hkv, Sk, D), any strides.
        keep: share of the tokens to keep, more than 0 and at most 1.
        allowed: (B, Sk) bool, tokens that may be chosen; None for all.
        scale: factor of the scores; only the sign of this factor matters; None for 1/√D.
    """
    scores = _scores(query, Cache(key, key), allowed, scale)
    count = None if allowed is None else allowed.sum(dim=1)
    return _highest(scores, keep, count)


def choose_paged_tokens(
    query: Tensor,
    key_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    keep: float,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return the highest-scoring tokens in pages, (B, Hkv, K) int64, K = max(1, keep · N ·
    page_size), rounded."""
    cache = Cache.in_pages(key_pages, key_pages, block_table, lengths.contiguous())
    return _highest(_scores(query, cache, None, scale), keep, lengths)


def _scores(query: Tensor, cache: Cache, allowed: Tensor | None, scale: float | None) -> Tensor:
    """Return scores (B, Hkv, Sk) float32; -inf for tokens that may not be chosen."""
    kv_heads, kv_len, _ = cache.sizes
    scores = query.new_empty(query.shape[0], kv_heads, kv_len, dtype=torch.float32)
    read = query, cache.key, allowed, cache.lengths, cache.block_table
    shape = (query.device, *map(layout, read), scale)
    launch = _launches.get(shape) or _launches.keep(
        shape, _score_launch(query, cache, allowed, scale)
    )
    launch(*read, scores)
    return scores


_launches: PlanCache[Launch] = PlanCache()


def _score_launch(
    query: Tensor, cache: Cache, allowed: Tensor | None, scale: float | None
) -> Launch:
    """Return the launch for calls of one shape. The arguments are those of `_scores`."""
    check_shapes(query.shape, *cache.shapes)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len, _ = cache.sizes
    return Launch(
        _score_kernel,
        (triton.cdiv(kv_len, BLOCK_N) * batch * kv_heads, 1, 1),
        query.device,
        named("stride_query_", ("batch", "head", "token", "dim"), query.stride())
        | named("stride_key_", ("first", "head", "token", "dim"), cache.strides(cache.key))
        | named(
            "stride_allowed_", ("batch", "token"), (0, 0) if allowed is None else allowed.stride()
        )
        | {
            "scale": head_dim**-0.5 if scale is None else float(scale),
            "kv_heads": kv_heads,
            "group": heads // kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "head_dim": head_dim,
            "stride_table": 0 if cache.block_table is None else cache.block_table.stride(0),
            "PAGE_SIZE": cache.page_size,
            "BLOCK_M": 16,
            "BLOCK_N": BLOCK_N,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        },
        num_warps=4,
    )


def _highest(scores: Tensor, keep: float, lengths: Tensor | None) -> Tensor:
    count = min(max(1, round(keep * scores.shape[2])), scores.shape[2])
    # Sorting the tokens and converting their numbers to int32 would take additional launches.
    indices = scores.topk(count, dim=2, sorted=lengths is not None).indices
    if lengths is None:
        return indices
    own = (lengths.double() * keep).round().clamp(min=1).minimum(lengths)
    rank = torch.arange(count, device=indices.device)
    return indices.masked_fill_(rank >= own[:, None, None], -1)
