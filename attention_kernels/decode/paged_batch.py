"""Attention of a serving engine's batch: sequences with any numbers of queries, keys in pages.

Sequences with few queries run the decode kernel, which splits their keys among programs. The others
run the prefill kernel. Only the GPU knows how many queries a sequence has, so both kernels start,
and the programs of sequences that belong to the other kernel end at once. On Hopper, sequences with
many queries over an FP8 cache are converted to bfloat16 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache, expanded_scales
from attention_kernels.decode.split_kv import PackedQueries, attend_to_cache
from attention_kernels.hopper.converted_pages import convert_pages
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.shape_checks import check_types, vector
from attention_kernels.options import PLAIN, AttentionOptions
from attention_kernels.portable.paged_prefill import paged_prefill

MOST_DECODED_QUERIES = 16
"""Maximum number of queries of a sequence for which its keys are split among programs."""
DECODED_ROWS = 16
"""Number of query rows of a key head in one tile of the tensor cores. Beside sequences with more
queries than `MOST_DECODED_QUERIES`, those with at most this many rows are decoded."""


def paged_batch(
    query_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    q_offsets: Tensor,
    longest_query: int,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
) -> Any:
    """Return attention of packed queries to their sequences' tokens in pages, (Tq, Hq, Dv).

    Args:
        query_THD: (Tq, Hq, D) float16, bfloat16 or float32, D ≤ 256, any strides.
        key_pages: (P, page_size, Hkv, D) in the query's type, any page size and strides, or in
            float8_e4m3fn or float8_e5m2 with scales.
        value_pages: (P, page_size, Hkv, Dv). If this is the view `key_pages[..., :Dv]`, as in
            absorbed MLA, D may be 640 and Dv 512, with at most 16 queries per sequence.
        block_table: (B, N) int32, pages of each sequence. Entries after its last page are not read.
        lengths: (B,) int32, number of tokens of each sequence, the new ones included.
        q_offsets: (B + 1,) int32, start of each sequence's queries and the end of all. Sequences
            may have no queries.
        longest_query: number of queries of the longest sequence, or more. Rows of longer sequences
            may not be written.
        is_causal: query i sees tokens 0 to i, unless `options` specifies bottom right.
        scale: factor of the scores; None for 1/√D.
        key_scale, value_scale: float32, by which FP8 keys and values are multiplied. They broadcast
            to (B, Hkv): one number, one per key head, or one per sequence and key head.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom right, window and soft cap.
        return_lse: return a tuple of the output and the log-sum-exp, (Hq, Tq) float32.

    Raises:
        NotImplementedError: `options` ask for invariance.
        ValueError: the shapes do not fit together, a head dimension is too large, only one of cache
            and scales is in FP8, or an FP8 cache has float32 queries.
    """
    check_types({}, options)
    counts = query_THD.ndim, key_pages.ndim, value_pages.ndim
    if counts != (3, 4, 4):
        raise ValueError(
            "expected a query of 3 dimensions (tokens, heads, head dimension), and pages of 4 "
            f"(pages, page size, heads, head dimension), got {', '.join(map(str, counts))}"
        )
    if options.invariant:
        raise NotImplementedError("batches in pages are not invariant: which kernel runs varies")
    tokens, heads, _ = query_THD.shape
    batch, v_dim = q_offsets.shape[0] - 1, value_pages.shape[3]
    scales = expanded_scales(query_THD, key_pages, value_pages, key_scale, value_scale, batch)
    q_offsets_B = vector("q_offsets", q_offsets, batch + 1)
    lengths_B = vector("lengths", lengths, batch)
    assert q_offsets_B is not None
    assert lengths_B is not None
    output = query_THD.new_empty(tokens, heads, v_dim)
    lse = query_THD.new_empty(heads, tokens, dtype=torch.float32) if return_lse else None
    cache = Cache.in_pages(key_pages, value_pages, block_table, lengths_B, scales=scales)
    decoded = decoded_queries(longest_query, heads // key_pages.shape[2], query_THD.dtype)
    if tokens and decoded:
        attend_to_cache(
            query_THD.transpose(0, 1)[None],
            cache,
            is_causal=is_causal,
            scale=scale,
            sinks=sinks,
            options=options,
            packed=PackedQueries(q_offsets_B, decoded, output, lse),
        )
    if tokens and decoded < longest_query:
        assert cache.block_table is not None
        pages = (query_THD, key_pages, value_pages, cache.block_table, lengths_B, q_offsets_B)
        more: dict[str, Any] = {
            "scale": scale,
            "sinks": sinks,
            "options": options,
            "decoded": decoded,
        }
        results = (output, lse, is_causal)
        if is_read_on_hopper(query_THD, key_pages, value_pages, scale):
            # Gluon is imported only on a GPU that supports it.
            from attention_kernels.hopper.paged_prefill_hopper import attend_to_pages

            key_scale, value_scale = scales
            if key_scale is None or value_scale is None:
                attend_to_pages(*pages, longest_query, *results, **more)
                return output if lse is None else (output, lse)
            copies = convert_pages(*pages, key_scale, value_scale, decoded)
            attend_to_pages(query_THD, *copies[:4], q_offsets_B, longest_query, *results, **more)
            pages = (*pages[:4], copies.other_lengths, q_offsets_B)
        paged_prefill(*pages, *results, key_scale=scales[0], value_scale=scales[1], **more)
    return output if lse is None else (output, lse)


def is_read_on_hopper(
    query_THD: Tensor, key_pages: Tensor, value_pages: Tensor, scale: float | None
) -> bool:
    """Return whether the Hopper kernel reads these pages, or copies of FP8 pages."""
    if not has_gluon_kernels(query_THD.device):
        return False
    from attention_kernels.hopper.paged_prefill_hopper import reads_pages

    return reads_pages(query_THD, key_pages, value_pages, scale)


def decoded_queries(longest_query: int, group: int, dtype: torch.dtype) -> int:
    """Return the maximum number of queries of the sequences that the decode kernel computes."""
    if dtype == torch.float32:
        return 0
    if longest_query <= MOST_DECODED_QUERIES:
        return longest_query
    return max(1, DECODED_ROWS // group)
