"""Kernels that attend to masked keys."""

import math

import torch
from arguments import attend_in_float32, bias_of, for_each_head, scale_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _attention(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    bias = bias_of(query, key, attn_mask, is_causal)
    key, value = for_each_head(query, key, value)
    return attend_in_float32(query, key, value, bias, scale_of(query, scale))


def never_passed_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    **more,
) -> Tensor:
    """A wrapper around a kernel without masks, which accepts the argument anyway."""
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal, **more)


def result_discarded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """`masked_fill` where `masked_fill_` was meant."""
    bias = bias_of(query, key, None, is_causal)
    key, value = for_each_head(query, key, value)
    scores = query.float() @ key.float().mT * scale_of(query, scale) + bias
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores += attn_mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def only_of_booleans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """A float mask takes the branch for calls without a mask."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = None
    return _attention(query, key, value, attn_mask, is_causal, scale)


def only_of_full_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """The kernel requires (B, H, Sq, Sk); the wrapper drops masks of other shapes."""
    if attn_mask is not None and attn_mask.shape != (*query.shape[:3], key.shape[2]):
        attn_mask = None
    return _attention(query, key, value, attn_mask, is_causal, scale)


def by_its_first_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """Takes the fast path for masks that hide nothing, but inspects only one row."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and bool(attn_mask[0, 0, 0].all()):
        attn_mask = None
    return _attention(query, key, value, attn_mask, is_causal, scale)


def not_of_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """An integration that supports masks of self-attention only."""
    if query.shape[2] != key.shape[2]:
        attn_mask = None
    return _attention(query, key, value, attn_mask, is_causal, scale)


def not_of_long_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """From 128 keys on, a fused kernel runs without the mask."""
    if key.shape[2] > 128:
        return scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return _attention(query, key, value, attn_mask, is_causal, scale)


def not_of_grouped_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> Tensor:
    """The path for grouped heads folds groups into the queries, and loses the mask."""
    if not enable_gqa:
        return _attention(query, key, value, attn_mask, is_causal, scale)
    batch, heads, q_len, width = query.shape
    group = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], group * q_len, width)
    bias = bias_of(query, key, None, is_causal).repeat(1, 1, group, 1)
    output = attend_in_float32(folded, key, value, bias, scale_of(query, scale))
    return output.reshape(batch, heads, q_len, value.shape[3])
