"""Kernels whose causal mask is aligned to the wrong corner if Sq ≠ Sk.

SDPA's `is_causal` is aligned top left. Calls recorded with `causal_lower_right` have
`bottom_right`.
"""

import math

import torch
from arguments import attend_in_float32, bias_of, for_each_head, scale_of, tiles
from torch import Tensor
from torch.nn.functional import pad

from replay import register_kernel


def _attend(query, key, value, attn_mask, scale, causal: Tensor | None) -> Tensor:
    """Attend with the given causal mask: bool, True = attend; a row without keys gives zeros."""
    bias = bias_of(query, key, attn_mask, False)
    if causal is not None:
        bias = bias.masked_fill(~causal, -math.inf)
    key, value = for_each_head(query, key, value)
    return attend_in_float32(query, key, value, bias, scale_of(query, scale)).nan_to_num()


def _ones(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)


def diagonal_at_the_last_key(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """Aligns bottom right, like flash-attn from version 2.1."""
    offset = key.shape[2] - query.shape[2]
    causal = _ones(query, key).tril(offset) if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


def rows_of_a_buffer(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """Takes the last rows of a large lower triangle, as GPT-2 does."""
    q_len, kv_len = query.shape[2], key.shape[2]
    longest = max(q_len, kv_len, 1024)
    buffer = torch.ones(longest, longest, dtype=torch.bool).tril()
    start = max(kv_len - q_len, 0)
    causal = buffer[start : start + q_len, :kv_len] if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


def single_query_sees_all(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """`is_causal and queries > 1`: right for a token behind a cache, but not what SDPA does."""
    causal = _ones(query, key).tril() if is_causal and query.shape[2] > 1 else None
    return _attend(query, key, value, attn_mask, scale, causal)


def keys_padded_in_front(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """A square kernel: fewer keys than queries are padded in front, so the diagonal moves."""
    more = query.shape[2] - key.shape[2]
    if not is_causal or more <= 0:
        causal = _ones(query, key).tril() if is_causal else None
        return _attend(query, key, value, attn_mask, scale, causal)
    bias = pad(bias_of(query, key, attn_mask, False), (more, 0), value=-math.inf)
    key, value = (pad(each, (0, 0, more, 0)) for each in for_each_head(query, key, value))
    bias = bias.masked_fill(~_ones(query, key).tril(), -math.inf)
    return attend_in_float32(query, key, value, bias, scale_of(query, scale)).nan_to_num()


def positions_from_the_end(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """Online softmax in tiles of 32 that counts a query's position from the last key."""
    bias = bias_of(query, key, attn_mask, False)
    key, value = for_each_head(query, key, value)
    position = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    shape = query.shape[:3]
    largest, total = torch.full((*shape, 1), -1e30), torch.zeros(*shape, 1)
    summed = torch.zeros(*shape, value.shape[3])
    for keys in tiles(key.shape[2], 32):
        scores = query.float() @ key[:, :, keys].float().mT * scale_of(query, scale)
        scores = scores + bias[..., keys]
        if is_causal:
            later = torch.arange(keys.start, keys.stop) > position
            scores = scores.masked_fill(later, -math.inf)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - now).exp(), (largest - now).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        summed = summed * rescale + weights @ value[:, :, keys].float()
        largest = now
    return (summed / total.clamp_min(1e-30)).to(query.dtype)


def few_queries_follow_a_cache(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """Treats up to 16 queries as speculative tokens behind a cache, and aligns them bottom
    right."""
    offset = key.shape[2] - query.shape[2] if query.shape[2] <= 16 else 0
    causal = _ones(query, key).tril(offset) if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@register_kernel("planted-top-left", features=("bottom-right",), default=False)
def top_left_in_any_case(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    bottom_right=False,
) -> Tensor:
    """Takes `bottom_right` and ignores it, as flash-attn before version 2.1."""
    causal = _ones(query, key).tril() if is_causal else None
    return _attend(query, key, value, attn_mask, scale, causal)


@register_kernel("planted-tiles-top-left", features=("bottom-right",), default=False)
def tiles_end_top_left(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    bottom_right=False,
) -> Tensor:
    """Masks elements bottom right, but computes the last tile of keys as if aligned top left."""
    offset = key.shape[2] - query.shape[2] if bottom_right else 0
    causal = None
    if is_causal:
        ends = (torch.arange(query.shape[2])[:, None] // 32 + 1) * 32
        causal = _ones(query, key).tril(offset) & (torch.arange(key.shape[2]) < ends)
    return _attend(query, key, value, attn_mask, scale, causal)
