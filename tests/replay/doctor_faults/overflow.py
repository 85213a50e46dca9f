"""Kernels whose scores, exponentials, sums or casts exceed float16's range."""

import torch
from arguments import online_softmax, tiles, with_sdpa_arguments
from torch import Tensor

HALF = torch.finfo(torch.float16)


@with_sdpa_arguments
def scores_before_scaling(query, key, value, bias, scale) -> Tensor:
    """QKᵀ is stored in float16 and scaled afterwards."""
    scores = (query.half() @ key.half().mT) * scale
    return ((scores.float() + bias).softmax(-1) @ value.float()).to(query.dtype)


@with_sdpa_arguments
def softmax_without_maximum(query, key, value, bias, scale) -> Tensor:
    """Computes exp(score) / Σ exp(score) without subtracting the maximum."""
    weights = (query.float() @ key.float().mT * scale + bias).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights @ value.float()).to(query.dtype)


@with_sdpa_arguments
def saturating_scores(query, key, value, bias, scale) -> Tensor:
    """Unscaled scores are clamped to float16's range "for safety", so the largest are all equal."""
    scores = (query.float() @ key.float().mT).clamp(HALF.min, HALF.max) * scale
    return ((scores + bias).softmax(-1) @ value.float()).to(query.dtype)


@with_sdpa_arguments
def partial_products_in_half(query, key, value, bias, scale) -> Tensor:
    """head_dim is summed in two halves, each stored in float16, which gives ∞ - ∞ instead of 0."""
    scores = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float16)
    for channels in tiles(query.shape[3], query.shape[3] // 2):
        scores += query[..., channels].half() @ key[..., channels].half().mT
    return ((scores.float() * scale + bias).softmax(-1) @ value.float()).to(query.dtype)


@with_sdpa_arguments
def exponentials_in_half(query, key, value, bias, scale) -> Tensor:
    """Subtracts a fixed 4 instead of the row's maximum, and keeps the exponentials in float16."""
    weights = (query.float() @ key.float().mT * scale + bias - 4.0).exp().half()
    total = weights.float().sum(-1, keepdim=True)
    return ((weights.float() @ value.float()) / total).to(query.dtype)


@with_sdpa_arguments
def accumulator_in_half(query, key, value, bias, scale) -> Tensor:
    """Online softmax whose accumulator, not yet divided by the row's sum, is float16."""
    return online_softmax(query, key, value, bias, scale, accumulator=torch.float16)


@with_sdpa_arguments
def values_cast_to_half(query, key, value, bias, scale) -> Tensor:
    """The product of weights and values is in float16, whatever the model's dtype."""
    weights = (query.float() @ key.float().mT * scale + bias).softmax(-1)
    return (weights @ value.half().float()).to(query.dtype)


@with_sdpa_arguments
def key_mean_in_half(query, key, value, bias, scale) -> Tensor:
    """K is smoothed by its mean, which is summed in float16."""
    total = torch.zeros_like(key[:, :, :1], dtype=torch.float16)
    for keys in tiles(key.shape[2], 16):
        total += key[:, :, keys].float().sum(2, keepdim=True).half()
    smooth = key.float() - total.float() / key.shape[2]
    weights = (query.float() @ smooth.mT * scale + bias).softmax(-1)
    return (weights @ value.float()).to(query.dtype)
