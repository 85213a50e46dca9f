"""Online softmax whose rescaling fails when a late block of keys has a much larger score.

All kernels use tiles of 64 keys, and are right if no late key has a much larger score.
"""

import math
from collections.abc import Callable

import torch
from arguments import split_softmax, tiles, with_sdpa_arguments
from torch import Tensor

LOG2E = math.log2(math.e)

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | float]]
"""Function of a tile's scores and the reference, which is the largest score of earlier tiles, or of
this one if it is the first. It returns the new reference, the weights, and the factor by which
earlier weights are rescaled."""


def _online(
    query,
    key,
    value,
    bias,
    scale,
    step: Step,
    *,
    scales_sum=True,
    scales_values=True,
    is_late=False,
) -> Tensor:
    """Compute an online softmax.

    Args:
        is_late: rescale after the block's weights have been added.
    """
    total = summed = reference = torch.zeros(())
    for keys in tiles(key.shape[2], 64):
        scores = query.float() @ key[:, :, keys].float().mT * scale + bias[..., keys]
        if keys.start == 0:
            reference = scores.amax(-1, keepdim=True)
        reference, weights, factor = step(scores, reference)
        if not is_late:
            total = total * factor if scales_sum else total
            summed = summed * factor if scales_values else summed
        total = total + weights.sum(-1, keepdim=True)
        summed = summed + weights @ value[:, :, keys].float()
        if is_late:
            total, summed = total * factor, summed * factor
    return (summed / total).to(query.dtype)


def _lazily(scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale only if the maximum jumps by more than 8, like FlashAttention 4."""
    now = scores.amax(-1, keepdim=True)
    current = torch.where(now - reference > 8.0, now, reference)
    return current, (scores - current).exp(), (reference - current).exp()


@with_sdpa_arguments
def sum_not_rescaled_on_a_jump(*inputs) -> Tensor:
    """Forgets to rescale the sum."""
    return _online(*inputs, _lazily, scales_sum=False)


@with_sdpa_arguments
def values_not_rescaled_on_a_jump(*inputs) -> Tensor:
    """Forgets to rescale the accumulator, as if a correction warp were never signalled."""
    return _online(*inputs, _lazily, scales_values=False)


@with_sdpa_arguments
def rescaled_one_block_late(*inputs) -> Tensor:
    """Rescales after the block is added, like a software pipeline that is one block late."""
    return _online(*inputs, _lazily, is_late=True)


@with_sdpa_arguments
def factor_clamped(*inputs) -> Tensor:
    """Clamps the rescaling factor to at least exp(-4), a leftover guard against underflow."""

    def step(scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        now = torch.maximum(reference, scores.amax(-1, keepdim=True))
        return now, (scores - now).exp(), (reference - now).clamp_min(-4.0).exp()

    return _online(*inputs, step)


@with_sdpa_arguments
def maximum_of_the_first_block(*inputs) -> Tensor:
    """Assumes that the sink is the first key: clamps scores to 8 above the first block's
    maximum."""

    def step(scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, float]:
        return reference, (scores - reference).clamp_max(8.0).exp(), 1.0

    return _online(*inputs, step)


@with_sdpa_arguments
def splits_merged_with_a_floor(query, key, *others) -> Tensor:
    """Split-KV in which each part has a weight of at least exp(-6), even if its scores are
    lower."""
    return split_softmax(query, key, *others, tiles(key.shape[2], 64), least=-6.0)


@with_sdpa_arguments
def jump_scaled_twice(query, key, value, bias, scale) -> Tensor:
    """Computes the factor of a jump above 8 from maxima that are scaled twice."""

    def step(scores: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        now = scores.amax(-1, keepdim=True)
        jumps = now - reference > 8.0
        factor = torch.where(jumps, torch.exp2(scale * (reference - now)), 1.0)
        current = torch.where(jumps, now, reference)
        return current, torch.exp2(scores - current), factor

    return _online(query, key, value, bias * LOG2E, scale * LOG2E, step)
