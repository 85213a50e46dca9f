"""Attention of a few queries over many keys: the keys split among programs, the parts merged.

Decoding has one query token, so there is no work to share out but along the keys (Flash-Decoding,
Dao, Haziza, Massa and Sizov 2023). A program attends with all query heads of one key/value head,
times the few query tokens, to one part of the keys, and leaves its maximum, its sum and its
unnormalised output. Whichever program of a head arrives last merges all parts, in their order: the
sums do not depend on who was last, and there is no second kernel to launch.

One program text serves four kinds of cache. Position i of a sequence is token i, or the token that
`indices` names; a token lies in its batch element's row, or in the page that `block_table` names.
Where position i is token i, keys and values come through tensor descriptors (TMA), if their strides
and the GPU allow it. What differs for a cache in 8 bits is in `quantised_cache.py`.

Letters: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, Sq and Sk query and key length,
D and Dv head dimensions, M = G · Sq rows of a key/value head (row r is head r // Sq, query r % Sq).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from capture.variant import PLAIN, Variant
from replay.kernels.triton.counters import counters
from replay.kernels.triton.descriptors import at, can_be_described, described, nowhere
from replay.kernels.triton.launch import Kept, Launch, layout, named
from replay.kernels.triton.quantised_cache import (
    CACHE_BLOCK,
    QuantisedCache,
    exponent,
    fit_query,
    to_float16,
)

SHORTEST = 128
"""Keys for which a program of its own is worth its start."""
LONG = 4096
"""Keys a program from which on two programs on a processor look up tokens faster than one."""
WORTH_DESCRIBING = 2**23
"""Numbers in keys and values from which on descriptors save the GPU more than they cost the host,
which is some microseconds each."""
MERGED_ELEMENTS = 4096
"""Numbers that a program reads at once when it merges parts: 32 registers of each thread."""


@triton.jit
def find_tokens(
    positions,
    is_valid,
    batch,
    length,
    indices_ptr,
    table_ptr,
    stride_table,
    HAS_INDICES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Tokens at `positions` (N,), whether there is one, and its place on a cache's token axis and
    on its first axis, which is of batch elements or of pages."""
    tokens = positions
    if HAS_INDICES:
        tokens = tl.load(indices_ptr + positions, mask=is_valid, other=-1)
        is_valid = (tokens >= 0) & (tokens < length)
        tokens = tl.where(is_valid, tokens, 0)
    if PAGE_SIZE == 0:
        slots = tokens.to(tl.int64)
        first = batch.to(tl.int64)
    else:
        slots = (tokens % PAGE_SIZE).to(tl.int64)
        places = table_ptr + batch.to(tl.int64) * stride_table + tokens // PAGE_SIZE
        first = tl.load(places, mask=is_valid, other=0).to(tl.int64)
    return tokens, is_valid, slots, first


@triton.jit
def _mask_bias(
    mask_ptr,
    batch,
    q_heads,
    queries,
    has_row,
    tokens,
    is_valid,
    stride_batch,
    stride_head,
    stride_query,
    stride_token,
    PER_ROW: tl.constexpr,
):
    """What a mask adds to scores in powers of two: (M, N), or (1, N) where all rows share it."""
    places = mask_ptr + batch.to(tl.int64) * stride_batch
    places += tokens.to(tl.int64)[None, :] * stride_token
    is_there = is_valid[None, :]
    if PER_ROW:
        rows = q_heads.to(tl.int64) * stride_head + queries.to(tl.int64) * stride_query
        places += rows[:, None]
        is_there = is_there & has_row[:, None]
    entries = tl.load(places, mask=is_there, other=0)
    # Added and not put in place: as in SDPA a masked NaN stays NaN.
    if mask_ptr.dtype.element_ty == tl.int1:
        bias = tl.where(entries, 0.0, float("-inf"))
    else:
        bias = entries.to(tl.float32) * 1.4426950408889634
    return bias


@triton.jit
def _merge(
    parts_ptr,
    sums_ptr,
    rows,
    has_row,
    columns,
    has_column,
    splits,
    q_rows,
    v_dim,
    BLOCK_SPLITS: tl.constexpr,
):
    """The output of some rows (R, Dv) from all their parts, `BLOCK_SPLITS` at a time."""
    highest = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.zeros(rows.shape, tl.float32)
    output = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for first in tl.range(0, splits, BLOCK_SPLITS, num_stages=3):
        group = first + tl.arange(0, BLOCK_SPLITS)
        places = group[:, None] * q_rows + rows[None, :]
        is_there = (group < splits)[:, None] & has_row[None, :]
        maxima = tl.load(sums_ptr + places * 2, mask=is_there, other=float("-inf"))
        sums = tl.load(sums_ptr + places * 2 + 1, mask=is_there, other=0.0)
        parts = tl.load(
            parts_ptr + places[:, :, None] * v_dim + columns[None, None, :],
            mask=is_there[:, :, None] & has_column[None, None, :],
            other=0.0,
        )
        higher = tl.maximum(highest, tl.max(maxima, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(maxima - base[None, :])
        shrink = tl.exp2(highest - base)
        highest = higher
        total = total * shrink + tl.sum(weights * sums, axis=0)
        output = output * shrink[:, None] + tl.sum(weights[:, :, None] * parts, axis=0)
    return output / tl.where(total == 0.0, 1.0, total)[:, None]


# Numbers that change from call to call must not each compile the kernel again.
@triton.jit(
    do_not_specialize=[
        "group", "q_len", "kv_len", "kept", "splits", "left", "right", "stride_table"
    ]
)  # fmt: skip
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    key_mean_ptr,
    value_scale_ptr,
    mask_ptr,
    sinks_ptr,
    lengths_ptr,
    indices_ptr,
    table_ptr,
    output_ptr,
    parts_ptr,
    arrivals_ptr,
    scale,
    cap,
    left,
    right,
    kv_heads,
    group,
    q_len,
    kv_len,
    kept,
    splits,
    head_dim,
    v_dim,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    stride_query_dim,
    stride_key_first,
    stride_key_head,
    stride_key_token,
    stride_key_dim,
    stride_value_first,
    stride_value_head,
    stride_value_token,
    stride_value_dim,
    stride_mask_batch,
    stride_mask_head,
    stride_mask_query,
    stride_mask_token,
    stride_table,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """`sinks_ptr`, `cap`, `left` and `right` are None where a call has none, and the scales and the
    mean where the cache is in 16 bits: they are then no arguments of the compiled program. With a
    cap, `scale` is that of the exponent in tanh.
    """
    IS_8_BIT: tl.constexpr = key_scale_ptr is not None
    split = tl.program_id(1)
    batch = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    q_rows = group * q_len
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = rows < q_rows
    q_heads = kv_head * group + rows // q_len
    queries = rows % q_len
    dims = tl.arange(0, BLOCK_D)
    has_dim = dims < head_dim
    columns = tl.arange(0, BLOCK_DV)
    has_column = columns < v_dim

    query_rows = batch.to(tl.int64) * stride_query_batch
    query_rows += q_heads.to(tl.int64) * stride_query_head
    query_rows += queries.to(tl.int64) * stride_query_token
    query = tl.load(
        query_ptr + query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_query_dim,
        mask=has_row[:, None] & has_dim[None, :],
        other=0.0,
    )
    if IS_8_BIT:
        key_mean_ptr += tl.program_id(0) * head_dim
        query, row_scales, row_offsets = fit_query(query, key_mean_ptr, dims, has_dim)
        row_scales *= scale * 1.4426950408889634
        row_offsets *= scale * 1.4426950408889634
        stored = tl.program_id(0).to(tl.int64) * tl.cdiv(kv_len, CACHE_BLOCK) * CACHE_BLOCK
        key_scale_ptr += stored
        value_scale_ptr += stored
    if UPCAST:
        query = query.to(tl.float32)
    if not HAS_DESCRIPTORS:
        key_ptr += kv_head.to(tl.int64) * stride_key_head
        value_ptr += kv_head.to(tl.int64) * stride_value_head
    key_dims = dims.to(tl.int64) * stride_key_dim
    value_dims = columns.to(tl.int64) * stride_value_dim
    indices_ptr += tl.program_id(0).to(tl.int64) * kept

    length = kv_len
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + batch)
    diagonal = 0
    if IS_BOTTOM_RIGHT:
        diagonal = length - q_len
    positions_begin = 0
    positions_end = length
    if HAS_INDICES:
        positions_end = kept
    if IS_CAUSAL:
        positions_end = tl.minimum(length, q_len + diagonal)
    if right is not None:
        positions_end = tl.minimum(length, q_len + diagonal + right)
    if left is not None:
        positions_begin = tl.maximum(diagonal - left, 0)
        if IS_8_BIT:
            positions_begin = positions_begin // CACHE_BLOCK * CACHE_BLOCK
    share = tl.cdiv(tl.cdiv(positions_end - positions_begin, BLOCK_N), splits) * BLOCK_N
    begin = positions_begin + split * share
    end = tl.minimum(begin + share, positions_end)

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Per key of a block, and summed at the end: a sum over warps would make them wait each time.
    totals = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if sinks_ptr is not None:
        # As if they were a key of the first part, whose value is 0.
        counts = has_row & (split == 0)
        sinks = tl.load(sinks_ptr + q_heads, mask=counts, other=float("-inf")).to(tl.float32)
        highest = sinks * 1.4426950408889634
        totals += tl.where(tl.arange(0, BLOCK_N) == 0, 1.0, 0.0)[None, :]
    output = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for first in range(begin, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        tokens, is_valid, slots, first_axis = find_tokens(
            positions,
            positions < end,
            batch,
            length,
            indices_ptr,
            table_ptr,
            stride_table,
            HAS_INDICES,
            PAGE_SIZE,
        )
        if HAS_DESCRIPTORS:
            key = key_ptr.load([batch, kv_head, first, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            key_rows = first_axis * stride_key_first + slots * stride_key_token
            key = tl.load(
                key_ptr + key_rows[:, None] + key_dims[None, :],
                mask=is_valid[:, None] & has_dim[None, :],
                other=0.0,
            )
        if IS_8_BIT:
            key = to_float16(key)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, tl.trans(key))
        if IS_8_BIT:
            key_scales = tl.load(key_scale_ptr + positions)
            scores = scores * row_scales[:, None] * key_scales[None, :] + row_offsets[:, None]
        else:
            scores *= scale * 1.4426950408889634
        if cap is not None:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASK != 0:
            scores += _mask_bias(
                mask_ptr,
                batch,
                q_heads,
                queries,
                has_row,
                tokens,
                is_valid,
                stride_mask_batch,
                stride_mask_head,
                stride_mask_query,
                stride_mask_token,
                MASK == 2,
            )
        if IS_CAUSAL:
            is_seen = tokens[None, :] <= queries[:, None] + diagonal
            scores += tl.where(is_seen, 0.0, float("-inf"))
        if right is not None:
            is_seen = tokens[None, :] <= queries[:, None] + (diagonal + right)
            scores += tl.where(is_seen, 0.0, float("-inf"))
        if left is not None:
            is_seen = tokens[None, :] >= queries[:, None] + (diagonal - left)
            scores += tl.where(is_seen, 0.0, float("-inf"))
        scores = tl.where(is_valid[None, :], scores, float("-inf"))
        if IS_8_BIT:
            value_scales = tl.load(value_scale_ptr + positions, mask=is_valid, other=1.0)
            higher = tl.max(scores + exponent(value_scales)[None, :], axis=1)
            higher = tl.maximum(highest, higher)
        else:
            higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        highest = higher
        totals = totals * shrink[:, None] + weights

        if IS_8_BIT:
            block = first // CACHE_BLOCK
            inside = first - block * CACHE_BLOCK
            value = value_ptr.load([batch, kv_head, block * v_dim, inside])
            value = to_float16(tl.trans(value.reshape(BLOCK_DV, BLOCK_N)))
            weights *= value_scales[None, :]
        elif HAS_DESCRIPTORS:
            value = value_ptr.load([batch, kv_head, first, 0]).reshape(BLOCK_N, BLOCK_DV)
        else:
            value_rows = first_axis * stride_value_first + slots * stride_value_token
            value = tl.load(
                value_ptr + value_rows[:, None] + value_dims[None, :],
                mask=is_valid[:, None] & has_column[None, :],
                other=0.0,
            )
        weights = weights.to(value.dtype)
        if UPCAST:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        output = tl.dot(weights, value, output * shrink[:, None])

    total = tl.sum(totals, axis=1)

    # (B, Hq, Sq, Dv), contiguous: the rows of a key/value head follow one another.
    output_ptr += tl.program_id(0).to(tl.int64) * q_rows * v_dim
    if HAS_SPLITS:
        # The parts as (B · Hkv, splits, M, Dv), and behind them their maxima and sums.
        sums_ptr = parts_ptr + tl.num_programs(0).to(tl.int64) * splits * q_rows * v_dim
        sums_ptr += tl.program_id(0).to(tl.int64) * splits * q_rows * 2
        parts_ptr += tl.program_id(0).to(tl.int64) * splits * q_rows * v_dim
        own = split * q_rows + rows
        tl.store(sums_ptr + own * 2, highest, mask=has_row)
        tl.store(sums_ptr + own * 2 + 1, total, mask=has_row)
        tl.store(
            parts_ptr + own[:, None] * v_dim + columns[None, :],
            output,
            mask=has_row[:, None] & has_column[None, :],
        )
        tl.debug_barrier()  # every thread's part is stored before one of them says so
        arrivals_ptr += tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == splits - 1:
            tl.store(arrivals_ptr, 0)
            # Without the rows that only fill up a tensor core's tile.
            own_rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_ROWS)
            has_own = own_rows < q_rows
            merged = _merge(
                parts_ptr,
                sums_ptr,
                own_rows,
                has_own,
                columns,
                has_column,
                splits,
                q_rows,
                v_dim,
                BLOCK_SPLITS,
            )
            tl.store(
                output_ptr + own_rows[:, None] * v_dim + columns[None, :],
                merged.to(output_ptr.dtype.element_ty),
                mask=has_own[:, None] & has_column[None, :],
            )
    else:
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            output_ptr + rows[:, None] * v_dim + columns[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=has_row[:, None] & has_column[None, :],
        )


Access = Literal["described", "direct", "indirect", "quantised"]
"""Through tensor descriptors, through pointers, to tokens that have to be looked up first, or to 8
bits through descriptors."""


class Cache(NamedTuple):
    """Keys and values, and where in them the tokens of each sequence are."""

    key: Tensor
    """(B, Hkv, Sk, D), or pages (P, page_size, Hkv, D)."""
    value: Tensor
    """(B, Hkv, Sk, Dv), or pages (P, page_size, Hkv, Dv)."""
    block_table: Tensor | None = None
    """(B, pages of the longest sequence) int32; None when the keys are in one piece."""
    lengths: Tensor | None = None
    """(B,) int32, how many tokens each sequence has; None for all."""
    indices: Tensor | None = None
    """(B, Hkv, K) int32, the tokens to attend to; None for all. Those < 0 or ≥ the length are
    skipped."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hkv, the most tokens that a sequence can have, and Dv."""
        if self.block_table is None:
            return self.key.shape[1], self.key.shape[2], self.value.shape[3]
        return self.key.shape[2], self.block_table.shape[1] * self.page_size, self.value.shape[3]

    @property
    def layouts(self) -> Hashable:
        """All that a plan may depend on."""
        return tuple(map(layout, self))

    @property
    def scales(self) -> tuple[None, None, None]:
        """None: keys and values are in 16 bits."""
        return None, None, None

    @property
    def page_size(self) -> int:
        """Tokens in a page; 0 without pages."""
        return 0 if self.block_table is None else self.key.shape[1]

    def access(self, is_cut: bool) -> Access:
        """How the kernel reads it.

        Descriptors take whole blocks: no tokens that do not count may follow, whose values could be
        NaN, and a head dimension must be as wide as a block.

        Args:
            is_cut: whether a diagonal leaves some tokens out.
        """
        if self.block_table is not None or self.indices is not None:
            return "indirect"
        numbers = self.key.numel() + self.value.numel()
        if is_cut or self.lengths is not None or numbers < WORTH_DESCRIBING:
            return "direct"
        fits = all(
            tensor.shape[3] in (16, 32, 64, 128, 256) and can_be_described(tensor)
            for tensor in (self.key, self.value)
        )
        return "described" if fits else "direct"

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Of batch elements or pages, of heads, of tokens and within a head."""
        first, second, third, within = tensor.stride()
        paged = self.block_table is not None
        return (first, third, second, within) if paged else (first, second, third, within)

    def descriptors(self, block_n: int, block_d: int, block_dv: int) -> tuple[Any, Any]:
        """Of key and value, without their memory."""
        return (
            nowhere(described(self.key, block_n, block_d)),
            nowhere(described(self.value, block_n, block_dv)),
        )


class Tiling(NamedTuple):
    """How the work is cut."""

    block_n: int
    """Keys at a time."""
    warps: int
    stages: int
    splits: int


class Plan(NamedTuple):
    """What follows from the sizes of a call alone."""

    tiling: Tiling
    row_blocks: int
    block_m: int
    """Rows of a program, padded to a tensor core's tile, and `block_rows` without that."""
    block_rows: int
    block_d: int
    block_dv: int
    block_splits: int
    """Parts that a program merges at a time."""


@functools.lru_cache(maxsize=1024)
def plan(
    heads: int,
    rows: int,
    positions: int,
    head_dim: int,
    v_dim: int,
    access: Access,
    processors: int,
) -> Plan:
    """A deterministic choice, from measurements on an H200.

    Args:
        heads: B · Hkv.
        rows: G · Sq.
        positions: keys to attend to.
        access: how they are read.
        processors: streaming multiprocessors of the GPU.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    row_blocks = -(-rows // block_m)
    block_rows = min(1 << (rows - 1).bit_length(), block_m)
    # Powers of two that a tensor core's product can have as a side.
    block_d, block_dv = (max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, v_dim))
    widest = max(block_d, block_dv)
    if access == "quantised":
        block_n, stages = (128, 4) if widest <= 128 and block_m == 16 else (64, 4)
    elif access == "described" and widest <= 128:
        block_n, stages = (128, 4) if widest <= 64 else (128, 3)
    elif access == "indirect":
        block_n, stages = (128, 4) if widest <= 64 else (64, 5) if widest <= 128 else (32, 5)
    else:
        block_n, stages = (128, 3) if widest <= 64 else (64, 4) if widest <= 128 else (32, 4)
    # One program a processor moves as many bytes as several do, unless it has to look up where
    # long sequences are.
    splits = processors // (heads * row_blocks)
    if access == "indirect" and positions > splits * LONG:
        splits *= 2
    # Half the bytes come in half the time: two programs a processor hide each other's waiting.
    if access == "quantised":
        splits *= 2
    # Loading takes as long as bytes / splits and merging as bytes · splits: the sum is least where
    # both take as long. A program loads about twice as fast as it merges.
    itemsize = 1 if access == "quantised" else 2
    loaded, merged = positions * (block_d + block_dv) * itemsize, block_rows * block_dv * 4
    splits = min(splits, math.isqrt(loaded // (2 * merged)), -(-positions // SHORTEST))
    # Where nothing is merged, more warps hide more latency of a small block's loads.
    warps = 8 if widest <= 64 and splits <= 1 and access == "direct" else 4
    return Plan(
        Tiling(block_n, warps, stages, max(1, splits)),
        row_blocks,
        block_m,
        block_rows,
        block_d,
        block_dv,
        max(1, min(MERGED_ELEMENTS // (block_rows * block_dv), 16)),
    )


def attend(
    query: Tensor,
    cache: Cache | QuantisedCache,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    variant: Variant = PLAIN,
    tiles: Tiling | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ + mask) · V over a cache: (B, Hq, Sq, Dv), contiguous.

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, any strides.
        cache: in the query's dtype, any strides, or in 8 bits; on the query's device.
        attn_mask: broadcasts to (B, Hq, Sq, Sk); bool (True = attend) or float (added).
        is_causal: query i sees the tokens 0…i, whatever the lengths, as in SDPA, or if `variant`
            says bottom right, the last query all tokens and each before it one less.
        scale: of the scores; None is 1/sqrt(D).
        sinks: (Hq,), a logit of each head that takes weight and has no value.
        variant: bottom right, window and soft cap. Not with indices.
        tiles: how to cut the work, by default `tiling`.
    """
    output = query.new_empty((*query.shape[:3], cache.sizes[2]))
    if output.numel() == 0:
        return output
    aligned = (cache.key.data_ptr() | cache.value.data_ptr()) % 16 == 0
    shape = (
        query.device,
        layout(query),
        cache.layouts,
        layout(attn_mask),
        layout(sinks),
        is_causal,
        scale,
        variant,
        tiles,
        aligned,
    )
    planned = _calls.get(shape) or _calls.keep(
        shape, _plan_call(query, cache, attn_mask, is_causal, scale, variant, tiles)
    )
    parts = arrivals = output  # not touched
    if planned.parts_numbers:
        parts = torch.empty(planned.parts_numbers, dtype=torch.float32, device=query.device)
        arrivals = counters(planned.arrivals, query.device)
    key, value, scales = cache.key, cache.value, cache.scales
    if planned.descriptors is not None:
        of_key, of_value = planned.descriptors
        key, value = at(of_key, key), at(of_value, value)
    planned.launch(
        query,
        key,
        value,
        *scales,
        output if attn_mask is None else attn_mask,
        None if sinks is None else sinks.contiguous(),
        output if cache.lengths is None else cache.lengths,
        output if cache.indices is None else cache.indices,
        output if cache.block_table is None else cache.block_table,
        output,
        parts,
        arrivals,
    )
    return output


class _PlannedCall(NamedTuple):
    """What calls of one shape share."""

    launch: Launch
    parts_numbers: int
    """Room for the parts; 0 where there is one part only."""
    arrivals: int
    descriptors: tuple[Any, Any] | None
    """Of key and value, to be moved to theirs."""


_calls: Kept[_PlannedCall] = Kept()


def _plan_call(
    query: Tensor,
    cache: Cache | QuantisedCache,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    variant: Variant,
    tiles: Tiling | None,
) -> _PlannedCall:
    """All of a call but its tensors' addresses; arguments as those of `attend`."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len, v_dim = cache.sizes
    group = heads // kv_heads
    kept = 0 if cache.indices is None else cache.indices.shape[2]
    left, right = _limits(is_causal, variant, q_len, kv_len)
    is_causal, right = (True, None) if right == 0 else (False, right)
    access = cache.access(is_causal or left is not None or right is not None)
    cut = plan(
        batch * kv_heads,
        group * q_len,
        kept or _most_seen(left, 0 if is_causal else right, variant, q_len, kv_len),
        head_dim,
        v_dim,
        access,
        _processors(query.device),
    )
    has_descriptors = access in ("described", "quantised")
    tiles = tiles or cut.tiling
    splits = tiles.splits
    scale, cap = head_dim**-0.5 if scale is None else float(scale), None
    if variant.softcap is not None:
        scale, cap = 2 * scale / variant.softcap, variant.softcap / math.log(2)
    mask_kind = 0
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, q_len, kv_len)
        mask_strides = mask.stride()
        is_shared = all(mask.shape[axis] == 1 or mask_strides[axis] == 0 for axis in (1, 2))
        mask_kind = 1 if is_shared else 2
    launch = Launch(
        _attend_kernel,
        (batch * kv_heads, splits, cut.row_blocks),
        query.device,
        named("stride_query_", ("batch", "head", "token", "dim"), query.stride())
        | named("stride_key_", ("first", "head", "token", "dim"), cache.strides(cache.key))
        | named("stride_value_", ("first", "head", "token", "dim"), cache.strides(cache.value))
        | named("stride_mask_", ("batch", "head", "query", "token"), mask_strides)
        | {
            "scale": scale,
            "cap": cap,
            "left": left,
            "right": right,
            "kv_heads": kv_heads,
            "group": group,
            "q_len": q_len,
            "kv_len": kv_len,
            "kept": kept,
            "splits": splits,
            "head_dim": head_dim,
            "v_dim": v_dim,
            "stride_table": 0 if cache.block_table is None else cache.block_table.stride(0),
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": variant.bottom_right,
            "MASK": mask_kind,
            "HAS_LENGTHS": cache.lengths is not None,
            "HAS_INDICES": cache.indices is not None,
            "PAGE_SIZE": cache.page_size,
            "HAS_DESCRIPTORS": has_descriptors,
            "HAS_SPLITS": splits > 1,
            # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
            "UPCAST": query.device.type == "cpu",
            "BLOCK_M": cut.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": cut.block_d,
            "BLOCK_DV": cut.block_dv,
            "BLOCK_ROWS": cut.block_rows,
            "BLOCK_SPLITS": cut.block_splits,
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return _PlannedCall(
        launch,
        batch * heads * q_len * splits * (v_dim + 2) if splits > 1 else 0,
        batch * kv_heads * cut.row_blocks,
        cache.descriptors(tiles.block_n, cut.block_d, cut.block_dv) if has_descriptors else None,
    )


def _limits(
    is_causal: bool, variant: Variant, q_len: int, kv_len: int
) -> tuple[int | None, int | None]:
    """The window, of which causality is the right side; None for a side that leaves nothing out."""
    left, right = variant.window
    if is_causal:
        right = 0
    farthest = q_len + kv_len
    if left is not None and left >= farthest:
        left = None
    # The last query's diagonal is the last token, which one query alone always sees.
    if right is not None and (right >= farthest or (variant.bottom_right and q_len == 1)):
        right = None
    return left, right


def _most_seen(
    left: int | None, right: int | None, variant: Variant, q_len: int, kv_len: int
) -> int:
    """Tokens that the queries see together, at most."""
    most = kv_len
    if right is not None and not variant.bottom_right:
        most = min(most, q_len + right)
    return most if left is None else min(most, left + q_len + (right or 0))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # interpreted: few programs, but some splits
    return torch.cuda.get_device_properties(device).multi_processor_count
