"""Statistics of repeated timings: percentiles of one kernel, paired comparison of two.

Percentiles and not means, because a timing has a floor and a long tail. Raw samples are kept, so
that every figure can be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay.rows.row import Speedup, SpeedVerdict, TimeSummary

MINIMUM_PAIRS = 3
"""Fewer paired rounds give no interval."""

RESAMPLES = 4000
"""Bootstrap resamples: the interval's ends then move by less than the interval is wide."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile (0…100), by linear interpolation between order statistics.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarize(samples: Sequence[float]) -> TimeSummary:
    """The summary of `samples` (milliseconds).

    Raises:
        ValueError: there are no samples.
    """
    return TimeSummary(
        p10=percentile(samples, 10),
        p50=percentile(samples, 50),
        p90=percentile(samples, 90),
        iqr=percentile(samples, 75) - percentile(samples, 25),
        n=len(samples),
        samples=tuple(samples),
    )


def paired_speedup(baseline: Sequence[float], candidate: Sequence[float], seed: int = 0) -> Speedup:
    """Compare two kernels that were timed in the same rounds (milliseconds, by round).

    Each round gives one ratio, so a clock that drifts from round to round moves both times and not
    the ratio. The interval is the percentile bootstrap of the median (Efron 1979), deterministic
    for a `seed`. Rounds that only one of the two has are left out; the bootstrap of a handful of
    rounds spans no more than their smallest and largest ratio, so read a verdict beside its n.

    Raises:
        ValueError: fewer than `MINIMUM_PAIRS` rounds have both.
    """
    pairs = list(zip(baseline, candidate, strict=False))
    if len(pairs) < MINIMUM_PAIRS:
        raise ValueError(f"{len(pairs)} paired rounds; a comparison needs {MINIMUM_PAIRS}")
    ratios = [before / after for before, after in pairs]
    medians = resampled_medians(ratios, seed, RESAMPLES).tolist()
    low, high = percentile(medians, 2.5), percentile(medians, 97.5)
    return Speedup(percentile(ratios, 50), low, high, speed_verdict(low, high))


def speed_verdict(low: float, high: float) -> SpeedVerdict:
    """What an interval of a ratio says: a tie when it includes 1."""
    return "faster" if low > 1 else "slower" if high < 1 else "tie"


def resampled_medians(samples: Sequence[float], seed: int, resamples: int) -> Tensor:
    """Medians (resamples,) of samples drawn with replacement; a seed draws the same rounds."""
    ordered, ranked = torch.tensor(samples, dtype=torch.float64).sort()
    count = len(ordered)
    rank_of_round = torch.empty(count, dtype=torch.int32)
    rank_of_round[ranked] = torch.arange(count, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    # Ranks are sorted, not samples: integers sort ten times faster.
    ranks = rank_of_round[drawn].sort(dim=1).values.long()
    return (ordered[ranks[:, (count - 1) // 2]] + ordered[ranks[:, count // 2]]) / 2
