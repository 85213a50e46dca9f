"""Attention of a few queries to chosen tokens only. `token_choice` chooses tokens."""

from __future__ import annotations

from torch import Tensor

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.split_kv import attend_to_cache


def sparse_decode(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return attention to the tokens in `indices`, as a contiguous (B, Hq, Sq, Dv).

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, D ≤ 256, any strides.
        key: (B, Hkv, Sk, D), any strides.
        value: (B, Hkv, Sk, Dv), any strides.
        indices: (B, Hkv, K) int32 or int64, each token at most once; the query heads of a key head
            share the tokens. Negative entries and entries beyond the keys are skipped. The output
            is zeros if no entry remains.
        scale: factor of the scores; None for 1/√D.
    """
    return attend_to_cache(query, Cache(key, value, indices=indices.contiguous()), scale=scale)


def paged_sparse_decode(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return `sparse_decode` over pages; the other arguments are those of `paged_decode`.

    Args:
        indices: (B, Hkv, K) int32 or int64, positions in the sequence. Negative positions and
            positions beyond the sequence's end are skipped.
    """
    cache = Cache.in_pages(key_pages, value_pages, block_table, lengths, indices.contiguous())
    return attend_to_cache(query, cache, scale=scale)
