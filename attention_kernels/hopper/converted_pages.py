"""Pages of an FP8 cache in bfloat16, for the prefill kernel of Hopper GPUs.

Every tile of queries reads all keys of its sequence. A kernel that reads FP8 converts each number
once per tile; this one converts it once per call, and the prefill kernel then runs at its speed for
16 bits (docs/kernel-notes.md). Only the GPU knows the lengths, so it also decides which sequences
fit into the memory for copies. The others remain to `portable.paged_prefill`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.launcher import Launch, PlanCache, layout, named

TOKENS = 128
"""Number of tokens in a page of the copy: a block of keys of the prefill kernel, or more."""
LEAST_ROWS = 256
"""Minimum number of query rows of a key head for which a sequence is copied.

R rows over K keys of D numbers take 4 · R · K · D operations. At 600 TFLOPS instead of 300 (H200),
a copy saves 1 / 150 T of a second for each R · K · D. It reads and writes 6 · K · D bytes at
3.5 TB/s, which takes as long if R is 257.
"""
MOST_BYTES = 2**29
"""Maximum size of a copy of keys and values."""


class ConvertedPages(NamedTuple):
    """Copies of some sequences' pages, and which sequences remain."""

    key: Tensor
    """(N, TOKENS, Hkv, D) in the query's type, multiplied by the scales."""
    value: Tensor
    """(N, TOKENS, Hkv, Dv)."""
    table: Tensor
    """(B, M) int32, pages of the copied sequences."""
    lengths: Tensor
    """(B,) int32, number of tokens; -1 for sequences that were not copied."""
    other_lengths: Tensor
    """(B,) int32, number of tokens; -1 for sequences that were copied."""


def convert_pages(
    query_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q_offsets: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    decoded: int,
    most_bytes: int = MOST_BYTES,
) -> ConvertedPages:
    """Copy FP8 pages into pages of the query's type, with zeros after a sequence's last token.

    Args:
        query_THD, key_pages, value_pages, block_table, lengths, q_offsets: as for `paged_batch`.
        key_scale, value_scale: (B, Hkv) float32, by which keys and values are multiplied. Products
            are rounded to the query's type.
        decoded: sequences with at most this many queries are not copied.
        most_bytes: maximum size of the copies. Sequences are copied in order while they fit.
    """
    sequences, pages_each = block_table.shape
    page_size, kv_heads, head_dim = key_pages.shape[1:]
    v_dim = value_pages.shape[3]
    columns = triton.cdiv(pages_each * page_size, TOKENS)
    page_bytes = TOKENS * kv_heads * (head_dim + v_dim) * query_THD.element_size()
    pages = max(1, min(sequences * columns, most_bytes // page_bytes))
    converted = ConvertedPages(
        query_THD.new_empty(pages, TOKENS, kv_heads, head_dim),
        query_THD.new_empty(pages, TOKENS, kv_heads, v_dim),
        block_table.new_empty(sequences, columns),
        torch.empty_like(lengths),
        torch.empty_like(lengths),
    )
    given = (key_pages, value_pages, key_scale, value_scale, block_table)
    least_queries = max(decoded + 1, triton.cdiv(LEAST_ROWS * kv_heads, query_THD.shape[1]))
    shape = (*map(layout, (*given, lengths, q_offsets)), pages, query_THD.dtype, least_queries)
    launch = _launches.get(shape) or _launches.keep(shape, _plan(*given, converted, least_queries))
    launch(*given, lengths, q_offsets, *converted)
    return converted


_launches: PlanCache[Launch] = PlanCache()


def _plan(
    key: Tensor,
    value: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    table: Tensor,
    converted: ConvertedPages,
    least_queries: int,
) -> Launch:
    sequences = table.shape[0]
    pages, _, kv_heads, head_dim = converted.key.shape
    return Launch(
        convert_kernel,
        (pages, kv_heads, 1),
        table.device,
        named("stride_key_", ("page", "token", "head", "dim"), key.stride())
        | named("stride_value_", ("page", "token", "head", "dim"), value.stride())
        | named("stride_key_scale_", ("sequence", "head"), key_scale.stride())
        | named("stride_value_scale_", ("sequence", "head"), value_scale.stride())
        | {
            "stride_table": table.stride(0),
            "sequences": sequences,
            "least_queries": least_queries,
            "pages": pages,
            "columns": converted.table.shape[1],
            "PAGE_SIZE": key.shape[1],
            "HEAD_DIM": head_dim,
            "V_DIM": value.shape[3],
            "PAGE": TOKENS,
            "BLOCK_SEQUENCES": triton.next_power_of_2(sequences),
        },
        num_warps=4,
    )


# Numbers that change from call to call must not cause a recompilation.
@triton.jit(
    do_not_specialize=[
        "stride_table", "sequences", "least_queries", "pages", "columns",
        "stride_key_scale_sequence", "stride_key_scale_head", "stride_value_scale_sequence",
        "stride_value_scale_head",
    ]
)  # fmt: skip
def convert_kernel(
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    lengths_ptr,
    q_offsets_ptr,
    new_key_ptr,
    new_value_ptr,
    new_table_ptr,
    new_lengths_ptr,
    other_lengths_ptr,
    stride_key_page,
    stride_key_token,
    stride_key_head,
    stride_key_dim,
    stride_value_page,
    stride_value_token,
    stride_value_head,
    stride_value_dim,
    stride_key_scale_sequence,
    stride_key_scale_head,
    stride_value_scale_sequence,
    stride_value_scale_head,
    stride_table,
    sequences,
    least_queries,
    pages,
    columns,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """Write one page of the copy for one key head: PAGE tokens of the sequence that owns it."""
    page, head = tl.program_id(0), tl.program_id(1)
    own = tl.arange(0, BLOCK_SEQUENCES)
    exists = own < sequences
    lengths = tl.load(lengths_ptr + own, mask=exists, other=0)
    q_lens = tl.load(q_offsets_ptr + own + 1, mask=exists, other=0)
    q_lens -= tl.load(q_offsets_ptr + own, mask=exists, other=0)
    wanted = tl.where(q_lens >= least_queries, tl.cdiv(lengths, PAGE), 0)
    ends = tl.cumsum(wanted, 0)
    is_copied = (q_lens >= least_queries) & (ends <= pages)
    if (page == 0) & (head == 0):
        tl.store(new_lengths_ptr + own, tl.where(is_copied, lengths, -1), mask=exists)
        tl.store(other_lengths_ptr + own, tl.where(is_copied, -1, lengths), mask=exists)
    is_owner = is_copied & (ends - wanted <= page) & (page < ends)
    if tl.sum(is_owner.to(tl.int32), 0) == 0:
        return
    sequence = tl.sum(tl.where(is_owner, own, 0), 0)
    column = page - tl.sum(tl.where(is_owner, ends - wanted, 0), 0)
    if head == 0:
        tl.store(new_table_ptr + sequence.to(tl.int64) * columns + column, page)
    length = tl.load(lengths_ptr + sequence)
    tokens = column * PAGE + tl.arange(0, PAGE)
    is_token = tokens < length
    table_ptr += sequence.to(tl.int64) * stride_table
    numbers = tokens.to(tl.uint32)  # dividing numbers without sign takes fewer instructions
    old_pages = tl.load(table_ptr + numbers // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    slots = (numbers % PAGE_SIZE).to(tl.int64)
    rows = (page.to(tl.int64) * PAGE + tl.arange(0, PAGE)) * tl.num_programs(1) + head
    unit = tl.load(
        key_scale_ptr + sequence * stride_key_scale_sequence + head * stride_key_scale_head
    )
    places = old_pages * stride_key_page + slots * stride_key_token
    key_ptr += head.to(tl.int64) * stride_key_head
    _copy(key_ptr, places, is_token, unit, stride_key_dim, new_key_ptr, rows, HEAD_DIM)
    unit = tl.load(
        value_scale_ptr + sequence * stride_value_scale_sequence + head * stride_value_scale_head
    )
    places = old_pages * stride_value_page + slots * stride_value_token
    value_ptr += head.to(tl.int64) * stride_value_head
    _copy(value_ptr, places, is_token, unit, stride_value_dim, new_value_ptr, rows, V_DIM)


@triton.jit
def _copy(source, places, is_token, unit, stride_dim, target, rows, DIM: tl.constexpr):
    """Copy rows of DIM numbers, a power of two, multiplied by `unit`."""
    columns = tl.arange(0, DIM)
    numbers = tl.load(
        source + places[:, None] + columns[None, :] * stride_dim,
        mask=is_token[:, None],
        other=0.0,
    )
    # Float16 holds all FP8 numbers, and a GPU converts FP8 to it in one step.
    products = numbers.to(tl.float16).to(tl.float32) * unit
    tl.store(target + rows[:, None] * DIM + columns[None, :], products.to(target.dtype.element_ty))
