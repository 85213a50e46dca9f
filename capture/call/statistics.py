"""How structured the attention of a call is: what makes it hard for a kernel, in a few figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall

QUERIES = 256
"""Of each head at most, evenly spaced."""
FEWEST_KEYS = 16
"""Of a query that counts: the entropy over fewer says little."""
OUTLIER = 4.0
"""How many times the median channel's size an outlier channel has."""


@dataclass(frozen=True)
class CallStatistics:
    """Means over batch, heads and queries, but for the channels.

    NaN where nothing counts: no query sees enough keys, or a head has fewer than two.
    """

    outlier_channels: float
    """Channels of K whose root mean square is over four times that of the head's median channel, of
    the head that has most. They take the range of an 8-bit scale (KIVI, Liu et al. 2024)."""
    key_offset: float
    """‖mean of K over tokens‖ / ‖its standard deviation‖, norms over channels: what smoothing K
    removes (SageAttention, Zhang et al. 2024), in units of what remains. Infinite for equal keys,
    and NaN for zeros."""
    entropy: float
    """Of the attention weights, relative to that of uniform ones: 1 is uniform."""
    largest: float
    """The largest weight of a query."""
    top_mass: float
    """Total weight of the heaviest 1 % of a query's keys."""


def call_statistics(call: AttentionCall) -> CallStatistics:
    """Figures of one call, head by head, with its mask, window, soft cap and sinks.

    Works in float32, on at most 256 queries of a head.
    """
    call = call.without_pages()
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
    """The mean of each figure over calls, and the most outlier channels; NaN does not count."""
    members = list(statistics)
    found = {
        field.name: _mean([getattr(each, field.name) for each in members])
        for field in fields(CallStatistics)
    }
    return CallStatistics(
        **found | {"outlier_channels": _most(each.outlier_channels for each in members)}
    )


def _of_keys(key: Tensor) -> tuple[float, float]:
    """Outlier channels and offset of a head's keys (Sk, D)."""
    if len(key) < 2:  # nothing is told from a token's own values
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
    """Entropy, largest weight and top mass of each of these queries that sees enough keys."""
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
    counted = _counted(values)
    return sum(counted) / len(counted) if counted else math.nan


def _most(values: Iterable[float]) -> float:
    return max(_counted(values), default=math.nan)


def _counted(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
