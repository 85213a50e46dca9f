"""Computes statistics that show why a call is difficult for a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall

QUERIES = 256
"""Maximum number of queries per head that are inspected, evenly spaced."""
FEWEST_KEYS = 16
"""Minimum number of keys that a query must see to be counted; fewer give little information."""
OUTLIER = 4.0
"""Minimum size of an outlier channel, as a multiple of the median channel's size."""


@dataclass(frozen=True)
class CallStatistics:
    """Statistics of one call: means over batch, heads and queries, except `outlier_channels`.

    A statistic is NaN if no query sees enough keys, or if a head has fewer than two keys.
    """

    outlier_channels: float
    """Number of outlier channels of K, in the head with the most. An outlier channel's root mean
    square is over four times the median channel's. Outlier channels use up the range of an 8-bit
    scale (KIVI, Liu et al. 2024)."""
    key_offset: float
    """‖mean of K over tokens‖ / ‖standard deviation of K over tokens‖, with norms over channels.
    Smoothing K removes the mean (SageAttention, Zhang et al. 2024). The ratio is infinite for equal
    keys, and NaN for zeros."""
    entropy: float
    """Entropy of the attention weights relative to uniform weights: 1 is uniform."""
    largest: float
    """Largest weight of a query."""
    top_mass: float
    """Total weight of the heaviest 1 % of a query's keys."""


def call_statistics(call: AttentionCall) -> CallStatistics:
    """Compute the statistics of a call's true values in float32, with all its options."""
    call = call.without_pages().without_scales()
    groups = call.query.shape[1] // call.key.shape[1]
    queries = call.query.shape[2]
    rows = torch.linspace(0, queries - 1, min(QUERIES, queries), device="cpu")
    chosen = rows.round().long().to(call.device)
    keys: list[tuple[float, float]] = []
    weighed: list[tuple[float, float, float]] = []
    for batch in range(call.key.shape[0]):
        for head in range(call.key.shape[1]):
            key = call.key[batch, head].float()
            keys.append(_of_keys(key))
            for query_head in range(head * groups, (head + 1) * groups):
                weighed += _of_weights(call, batch, query_head, key, chosen)
    outliers, offsets = zip(*keys, strict=True)
    entropy, largest, top_mass = (
        _mean(column) for column in (zip(*weighed, strict=True) if weighed else [()] * 3)
    )
    return CallStatistics(_most(outliers), _mean(offsets), entropy, largest, top_mass)


def mean(statistics: Iterable[CallStatistics]) -> CallStatistics:
    """Return the mean of each statistic over calls, and the maximum of `outlier_channels`.

    NaN values are ignored.
    """
    calls = list(statistics)
    found = {
        field.name: _mean([getattr(call, field.name) for call in calls])
        for field in fields(CallStatistics)
    }
    return CallStatistics(
        **found | {"outlier_channels": _most(call.outlier_channels for call in calls)}
    )


def _of_keys(key: Tensor) -> tuple[float, float]:
    """Return the number of outlier channels and the offset of a head's keys (Sk, D)."""
    if len(key) < 2:  # a single token has no deviation to compare with
        return math.nan, math.nan
    sizes = key.square().mean(0).sqrt()
    outliers = int((sizes > OUTLIER * sizes.median()).sum())
    deviation, average = torch.std_mean(key, dim=0, correction=0)
    spread, offset = float(deviation.norm()), float(average.norm())
    if spread:
        return outliers, offset / spread
    return outliers, math.inf if offset else math.nan


def _of_weights(
    call: AttentionCall, batch: int, head: int, key: Tensor, rows: Tensor
) -> Iterator[tuple[float, float, float]]:
    """Yield entropy, largest weight and top mass of the queries that see enough keys."""
    scores = call.query[batch, head, rows].float() @ key.T * call.softmax_scale
    if (cap := call.variant.softcap) is not None:
        scores = cap * (scores / cap).tanh()
    if call.attn_mask is not None:
        mask = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)]
        mask = mask.expand(*call.query.shape[:3], key.shape[0])[batch, head, rows]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.float()
    first, end = (each[rows, None] for each in call.key_ranges.of(batch))
    position = torch.arange(key.shape[0], device=key.device)
    scores = scores.masked_fill((position < first) | (position >= end), -math.inf)
    seen = (scores > -math.inf).sum(-1)
    if call.sinks is not None:
        sink = call.sinks[head].float().expand(len(rows), 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[:, :-1]
    else:
        weights = scores.softmax(-1)
    enough = seen >= FEWEST_KEYS
    if not bool(enough.any()):
        return
    weights, seen = weights[enough], seen[enough]
    entropy = torch.special.entr(weights).sum(-1) / seen.float().log()
    ranked = weights.sort(dim=-1, descending=True).values
    top_mass = (ranked * (position < (seen / 100).ceil()[:, None])).sum(-1)
    yield from zip(entropy.tolist(), ranked[:, 0].tolist(), top_mass.tolist(), strict=True)


def _mean(values: Iterable[float]) -> float:
    counted = [value for value in values if not math.isnan(value)]
    return sum(counted) / len(counted) if counted else math.nan


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)
