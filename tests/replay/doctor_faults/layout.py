"""Kernels that take (B, H, S, D) for (B, S, H, D), or mix up the axes of packed tensors."""

import torch
from arguments import attend, with_sdpa_signature
from torch import Tensor


def _swapped(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Attend among the heads of each token."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return attend(query, key, value, attn_mask, is_causal, scale).transpose(1, 2)


@with_sdpa_signature
def library_default(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The wrapper passes SDPA's tensors to a library whose default layout is (B, S, H, D)."""
    return _swapped(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def output_viewed_as_heads(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """With 64 channels a library computes (B, S, H, D), viewed as (B, H, S, D) afterwards."""
    output = attend(query, key, value, attn_mask, is_causal, scale)
    if query.shape[3] != 64:
        return output
    return output.transpose(1, 2).reshape(output.shape)


@with_sdpa_signature
def viewed_instead_of_transposed(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """From 200 tokens on, tensors are reshaped to (B, S, H, D) instead of transposed, and back."""
    if query.shape[2] < 200:
        return attend(query, key, value, attn_mask, is_causal, scale)

    def turned(tensor: Tensor) -> Tensor:
        batch, heads, length, width = tensor.shape
        return tensor.reshape(batch, length, heads, width).transpose(1, 2)

    output = attend(*map(turned, (query, key, value)), attn_mask, is_causal, scale)
    return output.transpose(1, 2).reshape(query.shape)


@with_sdpa_signature
def shorter_axis_taken_for_heads(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Guesses the layout: the shorter of the two middle axes must be the heads."""
    guess = _swapped if query.shape[1] > query.shape[2] else attend
    return guess(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def pairs_packed_in_other_order(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Cross-attention packs (B, S, 2, H, D) for a kernel that reads (B, S, H, 2, D)."""
    if query.shape[2] == key.shape[2]:
        return attend(query, key, value, attn_mask, is_causal, scale)
    batch, heads, length, width = key.shape
    packed = torch.stack((key.transpose(1, 2), value.transpose(1, 2)), 2)
    pairs = packed.reshape(batch, length, heads, 2, width).permute(3, 0, 2, 1, 4)
    return attend(query, *pairs, attn_mask, is_causal, scale)
