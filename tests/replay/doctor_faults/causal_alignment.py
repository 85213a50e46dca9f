"""Kernels whose causal mask is aligned to the wrong corner if Sq ≠ Sk.

SDPA's `is_causal` is aligned top left. Calls recorded with `causal_lower_right` have
the option `bottom_right`.
"""

import math

import torch
from arguments import (
    attend_in_float32,
    bias_of,
    for_each_head,
    online_softmax,
    with_sdpa_signature,
)
from torch import Tensor
from torch.nn.functional import pad

from replay import register_kernel


def _attend(query, key, value, attn_mask, scale, causal: Tensor | None) -> Tensor:
    """Attend with the given causal mask: bool, True = attend; a row without keys gives zeros."""
    bias = bias_of(query, key, attn_mask, False)
    if causal is not None:
        bias = bias.masked_fill(~causal, -math.inf)
    key, value = for_each_head(query, key, value)
    return attend_in_float32(query, key, value, bias, scale).nan_to_num()


def _ones(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)


@with_sdpa_signature
def diagonal_at_the_last_key(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Aligns bottom right, like flash-attn from version 2.1."""
    offset = key.shape[2] - query.shape[2]
    causal = _ones(query, key).tril(offset) if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@with_sdpa_signature
def rows_of_a_buffer(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Takes the last rows of a large lower triangle, as GPT-2 does."""
    q_len, kv_len = query.shape[2], key.shape[2]
    longest = max(q_len, kv_len, 1024)
    buffer = torch.ones(longest, longest, dtype=torch.bool).tril()
    start = max(kv_len - q_len, 0)
    causal = buffer[start : start + q_len, :kv_len] if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@with_sdpa_signature
def single_query_sees_all(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Ignores `is_causal` for one query, which is right after a cache, but not what SDPA does."""
    causal = _ones(query, key).tril() if is_causal and query.shape[2] > 1 else None
    return _attend(query, key, value, attn_mask, scale, causal)


@with_sdpa_signature
def keys_padded_in_front(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Pads keys in front if there are fewer keys than queries, so the diagonal moves."""
    more = query.shape[2] - key.shape[2]
    if not is_causal or more <= 0:
        causal = _ones(query, key).tril() if is_causal else None
        return _attend(query, key, value, attn_mask, scale, causal)
    bias = pad(bias_of(query, key, attn_mask, False), (more, 0), value=-math.inf)
    key, value = (pad(each, (0, 0, more, 0)) for each in for_each_head(query, key, value))
    bias = bias.masked_fill(~_ones(query, key).tril(), -math.inf)
    return attend_in_float32(query, key, value, bias, scale).nan_to_num()


@with_sdpa_signature
def positions_from_the_end(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Online softmax in tiles of 32 that counts a query's position from the last key."""
    bias = bias_of(query, key, attn_mask, False)
    if is_causal:
        bias = bias.masked_fill(~_ones(query, key).tril(key.shape[2] - query.shape[2]), -math.inf)
    return online_softmax(query, *for_each_head(query, key, value), bias, scale, size=32)


@with_sdpa_signature
def few_queries_follow_a_cache(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Treats up to 16 queries as speculative tokens behind a cache, and aligns them bottom
    right."""
    offset = key.shape[2] - query.shape[2] if query.shape[2] <= 16 else 0
    causal = _ones(query, key).tril(offset) if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@register_kernel("planted-top-left", features=("bottom-right",), default=False)
@with_sdpa_signature
def top_left_in_any_case(
    query, key, value, attn_mask, is_causal, scale, bottom_right=False
) -> Tensor:
    """Takes `bottom_right` and ignores it, as flash-attn did before version 2.1."""
    causal = _ones(query, key).tril() if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@register_kernel("planted-tiles-top-left", features=("bottom-right",), default=False)
@with_sdpa_signature
def tiles_end_top_left(
    query, key, value, attn_mask, is_causal, scale, bottom_right=False
) -> Tensor:
    """Masks elements bottom right, but computes the last tile of keys as if aligned top left."""
    offset = key.shape[2] - query.shape[2] if bottom_right else 0
    causal = None
    if is_causal:
        ends = (torch.arange(query.shape[2])[:, None] // 32 + 1) * 32
        causal = _ones(query, key).tril(offset) & (torch.arange(key.shape[2]) < ends)
    return _attend(query, key, value, attn_mask, scale, causal)
