"""Quantised kernels whose scales are ruined by one large channel of K."""

import torch
from arguments import tiles, with_sdpa_arguments
from torch import Tensor

from replay import register_kernel

FP8 = torch.finfo(torch.float8_e4m3fn)


def _to_int8(tensor: Tensor, largest: Tensor | float) -> Tensor:
    scale = largest / 127
    return (tensor / scale).round().clamp(-127, 127) * scale


def _quantised_query(query: Tensor) -> Tensor:
    """Quantise with a scale per query."""
    return _to_int8(query.float(), query.float().abs().amax(-1, keepdim=True))


def _attend(query, key, value, bias, scale) -> Tensor:
    """Compute the output from a key that is already quantised."""
    weights = (_quantised_query(query) @ key.mT * scale + bias).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


@register_kernel("planted-int8-per-tensor", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def one_scale_per_tensor(query, key, value, bias, scale) -> Tensor:
    """INT8 with one scale for all of K."""
    key = key.float()
    return _attend(query, _to_int8(key, key.abs().amax()), value, bias, scale)


@register_kernel("planted-int8-per-head", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def one_scale_per_head(query, key, value, bias, scale) -> Tensor:
    """INT8 with a scale per head."""
    key = key.float()
    return _attend(query, _to_int8(key, key.abs().amax((2, 3), keepdim=True)), value, bias, scale)


@register_kernel("planted-int8-per-block", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def one_scale_per_block(query, key, value, bias, scale) -> Tensor:
    """INT8 with a scale per 64 keys, as in SageAttention, but without smoothing."""
    blocks = [key[:, :, keys].float() for keys in tiles(key.shape[2], 64)]
    quantised = [_to_int8(each, each.abs().amax((2, 3), keepdim=True)) for each in blocks]
    return _attend(query, torch.cat(quantised, 2), value, bias, scale)


@register_kernel("planted-int8-per-token", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def one_scale_per_token(query, key, value, bias, scale) -> Tensor:
    """INT8 with a scale per key; every key contains the large channel."""
    key = key.float()
    return _attend(query, _to_int8(key, key.abs().amax(-1, keepdim=True)), value, bias, scale)


@register_kernel("planted-fp8-per-tensor", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def fp8_with_one_scale(query, key, value, bias, scale) -> Tensor:
    """FP8 with one scale for all of K: differences within the large channel are rounded away."""
    step = key.float().abs().amax() / FP8.max
    quantised = (key.float() / step).to(torch.float8_e4m3fn).float() * step
    return _attend(query, quantised, value, bias, scale)


@register_kernel("planted-wrong-smoothing", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def smoothed_over_channels(query, key, value, bias, scale) -> Tensor:
    """Subtracts the mean over each key's channels instead of the mean over keys.

    The mean is added back after quantisation.
    """
    key = key.float()
    mean = key.mean(-1, keepdim=True)
    smooth = key - mean
    quantised = _to_int8(smooth, smooth.abs().amax((2, 3), keepdim=True)) + mean
    return _attend(query, quantised, value, bias, scale)


@register_kernel("planted-smoothing-over-heads", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def smoothed_over_heads(query, key, value, bias, scale) -> Tensor:
    """Subtracts one mean for all heads: most of one head's outlier remains."""
    key = key.float()
    smooth = key - key.mean((1, 2), keepdim=True)
    quantised = _to_int8(smooth, smooth.abs().amax((2, 3), keepdim=True))
    return _attend(query, quantised, value, bias, scale)


@register_kernel("planted-clipped-scale", accuracy_class="quantised", default=False)
@with_sdpa_arguments
def clipped_at_a_percentile(query, key, value, bias, scale) -> Tensor:
    """Clips K at 1.5 times the 95th percentile of its magnitudes "to be robust to outliers"."""
    key = key.float()
    sample = key.abs().flatten()[:: max(key.numel() // 50_000, 1)]
    return _attend(query, _to_int8(key, 1.5 * sample.quantile(0.95)), value, bias, scale)
