"""Kernels without a fault, written in different ways."""

import arguments
import torch
from arguments import attend_in_float32, tiles, with_sdpa_arguments
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replay import register_kernel


def plain(query: Tensor, key: Tensor, value: Tensor, *more, **named) -> Tensor:
    """PyTorch's own attention."""
    return scaled_dot_product_attention(query, key, value, *more, **named)


@with_sdpa_arguments
def in_float32(query, key, value, bias, scale) -> Tensor:
    """The plain formula in float32."""
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def online_softmax(query, key, value, bias, scale) -> Tensor:
    """Online softmax over tiles of 64 keys, with the usual rescaling."""
    return arguments.online_softmax(query, key, value, bias, scale)


@with_sdpa_arguments
def queries_in_chunks(query, key, value, bias, scale) -> Tensor:
    """Attention slicing: PyTorch's own kernel runs on 48 queries at a time."""
    mask = bias.to(query.dtype)
    parts = [
        scaled_dot_product_attention(
            query[:, :, rows], key, value, attn_mask=mask[:, :, rows], scale=scale
        )
        for rows in tiles(query.shape[2], 48)
    ]
    return torch.cat(parts, 2)


def _to_int8(tensor: Tensor) -> Tensor:
    """Quantise with a scale per row."""
    step = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 127
    return (tensor / step).round() * step


@register_kernel("planted-honest-int8", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def smoothed_int8(query, key, value, bias, scale) -> Tensor:
    """QKᵀ in INT8 with a scale per row, after K's mean is subtracted from a copy."""
    smooth = key.float() - key.float().mean(2, keepdim=True)
    scores = _to_int8(query.float()) @ _to_int8(smooth).mT * scale + bias
    return (scores.softmax(-1) @ value.float()).to(query.dtype)
