"""Kernels whose causal mask is aligned to the wrong corner if Sq ≠ Sk.

SDPA's `is_causal` is aligned top left. Calls recorded with `causal_lower_right` have
the option `bottom_right`.
"""

import functools
import math
from collections.abc import Callable

import torch
from arguments import (
    attend_in_float32,
    bias_of,
    for_each_head,
    online_softmax,
    with_sdpa_signature,
)
from torch import Tensor

from replay import register_kernel


def with_own_causality(visible: Callable[..., Tensor]):
    """Give a function of (Sq, Sk) that returns a causal mask, True = attend, SDPA's signature.

    A row without keys gives zeros.
    """

    @with_sdpa_signature
    @functools.wraps(visible)
    def attention(query, key, value, attn_mask, is_causal, scale, **features) -> Tensor:
        bias = bias_of(query, key, attn_mask, False)
        if is_causal:
            causal = visible(query.shape[2], key.shape[2], **features)
            bias = bias.masked_fill(~causal, -math.inf)
        return attend_in_float32(query, *for_each_head(query, key, value), bias, scale).nan_to_num()

    return attention


def _lower(q_len: int, kv_len: int, offset: int = 0) -> Tensor:
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)


@with_own_causality
def diagonal_at_the_last_key(q_len, kv_len) -> Tensor:
    """Aligns bottom right, like flash-attn from version 2.1."""
    return _lower(q_len, kv_len, kv_len - q_len)


@with_own_causality
def rows_of_a_buffer(q_len, kv_len) -> Tensor:
    """Takes the last rows of a large lower triangle, as GPT-2 does."""
    longest, start = max(q_len, kv_len, 1024), max(kv_len - q_len, 0)
    return _lower(longest, longest)[start : start + q_len, :kv_len]


@with_own_causality
def single_query_sees_all(q_len, kv_len) -> Tensor:
    """Ignores `is_causal` for one query, which is right after a cache, but not what SDPA does."""
    return _lower(q_len, kv_len, kv_len if q_len == 1 else 0)


@with_own_causality
def keys_padded_in_front(q_len, kv_len) -> Tensor:
    """Pads keys in front if there are fewer keys than queries, so the diagonal moves."""
    more = max(q_len - kv_len, 0)
    return _lower(q_len, more + kv_len)[:, more:]


@with_sdpa_signature
def positions_from_the_end(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Online softmax in tiles of 32 that counts a query's position from the last key."""
    bias = bias_of(query, key, attn_mask, False)
    if is_causal:
        q_len, kv_len = query.shape[2], key.shape[2]
        bias = bias.masked_fill(~_lower(q_len, kv_len, kv_len - q_len), -math.inf)
    return online_softmax(query, *for_each_head(query, key, value), bias, scale, size=32)


@with_own_causality
def few_queries_follow_a_cache(q_len, kv_len) -> Tensor:
    """Treats up to 16 queries as speculative tokens behind a cache, and aligns them bottom
    right."""
    return _lower(q_len, kv_len, kv_len - q_len if q_len <= 16 else 0)


@register_kernel("planted-top-left", features=("bottom-right",), default=False)
@with_own_causality
def top_left_in_any_case(q_len, kv_len, bottom_right=False) -> Tensor:
    """Takes `bottom_right` and ignores it, as flash-attn did before version 2.1."""
    return _lower(q_len, kv_len)


@register_kernel("planted-tiles-top-left", features=("bottom-right",), default=False)
@with_own_causality
def tiles_end_top_left(q_len, kv_len, bottom_right=False) -> Tensor:
    """Masks elements bottom right, but computes the last tile of keys as if aligned top left."""
    ends = (torch.arange(q_len)[:, None] // 32 + 1) * 32
    aligned = _lower(q_len, kv_len, kv_len - q_len if bottom_right else 0)
    return aligned & (torch.arange(kv_len) < ends)
