"""Online softmax whose rescaling fails when a late block of keys has a much larger score.

All kernels use tiles of 64 keys, and are right if no late key has a much larger score.
"""

import math

import torch
from arguments import tiles, with_sdpa_arguments
from torch import Tensor

LOG2E = math.log2(math.e)


def _start(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the initial largest score, sum of weights and weighted values."""
    rows = query.shape[:3]
    return torch.full((*rows, 1), -1e30), torch.zeros(*rows, 1), torch.zeros(*rows, value.shape[3])


def _scores(query, key, bias, scale, keys) -> Tensor:
    return query.float() @ key[:, :, keys].float().mT * scale + bias[..., keys]


def _lazily(
    query, key, value, bias, scale, *, scales_sum=True, scales_values=True, is_late=False
) -> Tensor:
    """Rescale only if the maximum jumps by more than 8, like FlashAttention 4.

    Args:
        is_late: rescale after the block's weights have been added.
    """
    largest, total, summed = _start(query, value)
    for keys in tiles(key.shape[2], 64):
        scores = _scores(query, key, bias, scale, keys)
        now = scores.amax(-1, keepdim=True)
        if keys.start == 0:
            largest = now
        current = torch.where(now - largest > 8.0, now, largest)
        factor, weights = (largest - current).exp(), (scores - current).exp()
        if not is_late:
            total = total * factor if scales_sum else total
            summed = summed * factor if scales_values else summed
        total = total + weights.sum(-1, keepdim=True)
        summed = summed + weights @ value[:, :, keys].float()
        if is_late:
            total, summed = total * factor, summed * factor
        largest = current
    return (summed / total).to(query.dtype)


@with_sdpa_arguments
def sum_not_rescaled_on_a_jump(query, key, value, bias, scale) -> Tensor:
    """Forgets to rescale the sum."""
    return _lazily(query, key, value, bias, scale, scales_sum=False)


@with_sdpa_arguments
def values_not_rescaled_on_a_jump(query, key, value, bias, scale) -> Tensor:
    """Forgets to rescale the accumulator, as if a correction warp were never signalled."""
    return _lazily(query, key, value, bias, scale, scales_values=False)


@with_sdpa_arguments
def rescaled_one_block_late(query, key, value, bias, scale) -> Tensor:
    """Rescales after the block is added, like a software pipeline that is one block late."""
    return _lazily(query, key, value, bias, scale, is_late=True)


@with_sdpa_arguments
def factor_clamped(query, key, value, bias, scale) -> Tensor:
    """Clamps the rescaling factor to at least exp(-4), a leftover guard against underflow."""
    largest, total, summed = _start(query, value)
    for keys in tiles(key.shape[2], 64):
        scores = _scores(query, key, bias, scale, keys)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - now).exp()
        rescale = (largest - now).clamp_min(-4.0).exp() if keys.start else torch.zeros_like(now)
        total = total * rescale + weights.sum(-1, keepdim=True)
        summed = summed * rescale + weights @ value[:, :, keys].float()
        largest = now
    return (summed / total).to(query.dtype)


@with_sdpa_arguments
def maximum_of_the_first_block(query, key, value, bias, scale) -> Tensor:
    """Assumes that the sink is the first key: clamps scores to 8 above the first block's
    maximum."""
    largest, total, summed = _start(query, value)
    for keys in tiles(key.shape[2], 64):
        scores = _scores(query, key, bias, scale, keys)
        if keys.start == 0:
            largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).clamp_max(8.0).exp()
        total = total + weights.sum(-1, keepdim=True)
        summed = summed + weights @ value[:, :, keys].float()
    return (summed / total).to(query.dtype)


@with_sdpa_arguments
def splits_merged_with_a_floor(query, key, value, bias, scale) -> Tensor:
    """Split-KV in which each part has a weight of at least exp(-6), even if its scores are
    lower."""
    parts = []
    for keys in tiles(key.shape[2], 64):
        scores = _scores(query, key, bias, scale, keys)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        summed = weights @ value[:, :, keys].float()
        parts.append((largest, weights.sum(-1, keepdim=True), summed))
    largest = torch.stack([part[0] for part in parts]).amax(0)
    factors = [(part[0] - largest).clamp_min(-6.0).exp() for part in parts]
    total = sum(factor * part[1] for factor, part in zip(factors, parts, strict=True))
    summed = sum(factor * part[2] for factor, part in zip(factors, parts, strict=True))
    return (summed / total).to(query.dtype)


@with_sdpa_arguments
def jump_scaled_twice(query, key, value, bias, scale) -> Tensor:
    """Computes the factor of a jump above 8 from maxima that are scaled twice."""
    largest, total, summed = _start(query, value)
    for keys in tiles(key.shape[2], 64):
        scores = _scores(query, key, bias, scale, keys) * LOG2E
        now = scores.amax(-1, keepdim=True)
        if keys.start == 0:
            largest = now
        jumps = now - largest > 8.0
        factor = torch.where(jumps, torch.exp2(scale * (largest - now)), 1.0)
        largest = torch.where(jumps, now, largest)
        weights = torch.exp2(scores - largest)
        total = total * factor + weights.sum(-1, keepdim=True)
        summed = summed * factor + weights @ value[:, :, keys].float()
    return (summed / total).to(query.dtype)
