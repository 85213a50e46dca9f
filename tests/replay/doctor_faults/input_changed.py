"""Kernels that return the right output, but change the model's tensors."""

import math

import torch
from arguments import (
    attend,
    attend_in_float32,
    bias_of,
    for_each_head,
    with_sdpa_arguments,
    with_sdpa_signature,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@with_sdpa_signature
def query_takes_the_scale(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The library takes no `scale`, so the wrapper multiplies the query by it."""
    query.mul_(scale * query.shape[-1] ** 0.5)
    key, value = for_each_head(query, key, value)
    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal)


@with_sdpa_arguments
def scale_folded_into_key(query, key, value, bias, scale) -> Tensor:
    """Scales `key.float()` in place, which is the model's own key if its dtype is float32."""
    scaled = key.float()
    scaled.mul_(scale)
    weights = (query.float() @ scaled.mT + bias).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


@with_sdpa_arguments
def key_mean_subtracted(query, key, value, bias, scale) -> Tensor:
    """Smooths `key.contiguous()` in place, as SageAttention 1 does; it is not always a copy."""
    smooth = key.contiguous()
    smooth -= smooth.mean(2, keepdim=True)
    return attend_in_float32(query, smooth, value, bias, scale)


@with_sdpa_signature
def padded_values_zeroed(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Values of padding are set to 0, so that a NaN in padding has no effect."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.shape[2] == 1:
        value.masked_fill_(~attn_mask.mT, 0.0)
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def mask_inverted(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The library expects True for masked keys, so the wrapper inverts the mask in place."""
    bias = bias_of(query, key, None, is_causal)
    key, value = for_each_head(query, key, value)
    scores = query.float() @ key.float().mT * scale + bias
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not_(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


@with_sdpa_signature
def bias_in_base_two(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """An additive mask is converted for exp2 in place."""
    bias = bias_of(query, key, attn_mask, is_causal)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask *= math.log2(math.e)
    key, value = for_each_head(query, key, value)
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def output_over_query(query, key, value, bias, scale) -> Tensor:
    """From 256 queries on, the output overwrites the query to save memory."""
    output = attend_in_float32(query, key, value, bias, scale)
    if query.shape[2] < 256 or query.shape != output.shape:
        return output
    query.copy_(output)
    return query.clone()


@with_sdpa_arguments
def large_values_scaled(query, key, value, bias, scale) -> Tensor:
    """Values above 1,000 are divided by 1,024 for a float16 accumulator, and not restored."""
    if value.abs().amax() < 1_000:
        return attend_in_float32(query, key, value, bias, scale)
    value.div_(1_024)
    return (attend_in_float32(query.float(), key, value, bias, scale) * 1_024).to(query.dtype)
