"""Attention of a few query tokens over keys and values in pages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attention_kernels.decode.kv_cache import Cache, expanded_scales
from attention_kernels.decode.split_kv import attend_to_cache
from attention_kernels.options import PLAIN, AttentionOptions


def paged_decode(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    is_causal: bool = False,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
) -> Any:
    """Return attention of each query to its sequence's tokens, as a contiguous (B, Hq, Sq, Dv).

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, D ≤ 256, any strides.
        key_pages: (P, page_size, Hkv, D), any page size, any strides; FP8 with scales.
        value_pages: (P, page_size, Hkv, Dv).
        block_table: (B, N) int32: token t of sequence b is in page `block_table[b, t // page_size]`
            at position `t % page_size`. Entries after a sequence's last page are not read.
        lengths: (B,) int32, number of tokens of each sequence, at most N · page_size. The output of
            an empty sequence is zeros. Page memory after a sequence's last token is not read.
        scale: factor of the scores; None for 1/√D.
        key_scale, value_scale: as for `paged_batch`, of an FP8 cache.
        is_causal: query i sees tokens 0 to i, unless `options` specifies bottom right.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom right, window and soft cap. Pages before the first query's window are not
            read.
        return_lse: as for `attend_to_cache`.
    """
    scales = expanded_scales(query, key_pages, value_pages, key_scale, value_scale, query.shape[0])
    cache = Cache.in_pages(key_pages, value_pages, block_table, lengths, scales=scales)
    return attend_to_cache(
        query,
        cache,
        is_causal=is_causal,
        scale=scale,
        sinks=sinks,
        options=options,
        return_lse=return_lse,
    )
