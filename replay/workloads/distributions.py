"""Values of synthetic calls, which strain kernels like real values, unlike normal ones.

Each distribution starts from standard normal values, so a seed determines all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Values(NamedTuple):
    """Query (B, Hq, Sq, D), key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv) in float32."""

    query: Tensor
    key: Tensor
    value: Tensor

    def directed(self, scores: Tensor, scale: float) -> Values:
        """Add `scores` (Sk,), in expectation, to the scores of every query.

        Each query gets the same vector, and each key gets a multiple of this vector's direction. To
        balance the two, the vector and the largest multiple have the same length, √(most / scale).
        """
        most = scores.abs().max()
        length = (most / scale).sqrt()
        shares = scores / most.clamp(min=torch.finfo(scores.dtype).tiny)
        one = torch.ones_like(self.key[:, :, :1]) / math.sqrt(self.key.shape[-1])
        heads_per_group = self.query.shape[1] // self.key.shape[1]
        query = self.query + length * one.repeat_interleave(heads_per_group, dim=1)
        key = _without(self.key, one) + (shares * length)[:, None] * one
        return self._replace(query=query, key=key)


class Distribution(NamedTuple):
    """Distribution of values, with the reason to test kernels on such values."""

    apply: Callable[[Values, float], Values]
    """Function that makes the values from standard normal values and the softmax scale."""
    provokes: str
    """Effect of the values on kernels, and the source that observed it."""


OUTLIERS = 4
OUTLIER_SIZE = 20.0
SINK = 12.0
SINK_VALUE = 0.1
STAIRCASE = 60.0
SMOOTHNESS = 0.9
NEGLIGIBLE = 1e-6


def _without(values: Tensor, direction: Tensor) -> Tensor:
    """Return the part of values (…, S, D) that is orthogonal to a direction (…, 1, D)."""
    return values - (values * direction).sum(-1, keepdim=True) * direction


def _uniform(values: Values, scale: float) -> Values:
    """Map each value to its quantile, which gives uniform values in [0, 1)."""
    return Values(*map(torch.special.ndtr, values))


def _outlier_channels(values: Values, scale: float) -> Values:
    """Move a few channels of K far from 0 for every token, and make Q small in these channels."""
    channels = torch.linspace(0, values.key.shape[-1] - 1, OUTLIERS).round().long()
    key, query = values.key.clone(), values.query.clone()
    key[..., channels] = key[..., channels] + OUTLIER_SIZE
    query[..., channels] = query[..., channels] / OUTLIER_SIZE
    return values._replace(query=query, key=key)


def _sink_at(values: Values, scale: float, place: int) -> Values:
    scores = torch.zeros(values.key.shape[2], device=values.key.device)
    scores[place] = SINK
    found = values.directed(scores, scale)
    value = found.value.clone()
    value[:, :, place] *= SINK_VALUE
    return found._replace(value=value)


def _staircase(values: Values, scale: float) -> Values:
    count, device = values.key.shape[2], values.key.device
    return values.directed(torch.linspace(0, STAIRCASE, count, device=device), scale)


def _underflow(values: Values, scale: float) -> Values:
    """Raise the score of key 0 by ln(Sk - 1), so that key 0 weighs as much as all other keys."""
    count = values.key.shape[2]
    small = values._replace(query=values.query / 4, key=values.key / 4)
    scores = torch.zeros(count, device=values.key.device)
    scores[0] = math.log(max(count - 1, 1))
    return small.directed(scores, scale)


def _model_like(values: Values, scale: float) -> Values:
    """Make neighbouring tokens similar, channels unequal, K's mean not 0, and token 0 a sink."""
    query, key, value = map(_smooth, values)
    dim = key.shape[-1]
    sizes = torch.exp(torch.linspace(-1.0, 1.0, dim, device=key.device))
    offset = torch.linspace(-2.0, 2.0, dim, device=key.device)
    shaped = Values(query / sizes, key * sizes + offset, value)
    scores = torch.zeros(key.shape[2], device=key.device)
    scores[0] = SINK / 2
    return shaped.directed(scores, scale)


def _smooth(values: Tensor) -> Tensor:
    """Turn values into a first-order autoregressive sequence over tokens, with variance 1.

    Each step doubles the number of summed tokens: (1 + az)(1 + a²z²)(1 + a⁴z⁴)… equals Σ (az)ⁿ.
    """
    found = values * math.sqrt(1 - SMOOTHNESS**2)
    found[:, :, 0] = values[:, :, 0]
    shift, count = 1, values.shape[2]
    while shift < count and SMOOTHNESS**shift > NEGLIGIBLE:
        found[:, :, shift:] = found[:, :, shift:] + SMOOTHNESS**shift * found[:, :, :-shift]
        shift *= 2
    return found


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution(
        lambda values, scale: values,
        "standard normal, independent, as most microbenchmarks use; nothing stands out, which "
        "flatters 8-bit kernels",
    ),
    "uniform": Distribution(
        _uniform,
        "on [0, 1), as torch.rand draws: all scores are large and alike, so that attention is a "
        "mean of V and errors in the softmax hardly show",
    ),
    "outlier-channels": Distribution(
        _outlier_channels,
        "a few channels of K are 20 deviations from 0 for every token: they take the range of an "
        "8-bit scale unless K is smoothed, as SageAttention and KIVI found in trained models",
    ),
    "sink": Distribution(
        partial(_sink_at, place=0),
        "the first key draws most of the weight and has a small value, as in language "
        "models (StreamingLLM): the weight of all other keys lies in the last bits",
    ),
    "late-sink": Distribution(
        partial(_sink_at, place=-1),
        "a sink at the last key: the largest score comes in the last tile, and a kernel that "
        "rescales wrongly loses all earlier tiles; it turned videos black",
    ),
    "staircase": Distribution(
        _staircase,
        "scores rise along the keys by 60: every tile has a new maximum, the most rescaling there "
        "can be, also where small steps are skipped (FlashAttention 4)",
    ),
    "underflow": Distribution(
        _underflow,
        "one key weighs as much as all others together: half of the output is made of weights "
        "that 8-bit types round to 0",
    ),
    "model-like": Distribution(
        _model_like,
        "neighbouring tokens alike, channels of different size, K with a mean, a mild sink: the "
        "structure that trained models have and normal values lack (docs/method.md)",
    ),
}
"""Distributions by their names in `--distribution`."""
