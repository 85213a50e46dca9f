"""The statistics of repeated timings: percentiles of one kernel, and paired comparison of two.

The interval of a speed-up is an exact interval of order statistics. With X ~ Binomial(n, 1/2), the
k-th smallest and k-th largest of n independent samples enclose their median with probability
1 - 2·P(X < k) (Conover, Practical Nonparametric Statistics, 3rd ed., 1999, section 3.2). We print
95 %, and choose the largest k for 97.5 %. With fewer than six samples there is no interval.

A disturbance of the whole machine makes a round's ratio larger or smaller with equal probability,
because the order of the kernels is shuffled. A disturbance of one kernel for several rounds does
not average out. So the range of ranks is multiplied by √((1 + r) / (1 - r)), the factor for a
first-order autoregressive process (Bartlett 1946). Its parameter r is estimated from the ratios.
`tests/replay/timing/test_coverage.py` simulates both kinds of disturbance.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from replay.rows.row import SpeedReason, Speedup, SpeedVerdict, TimeSummary
from replay.timing.defaults import MINIMUM_ROUNDS

ONE_IN = 80
"""The interval lies above the median in at most one case of this many, and below it in as many.
So it contains the median in 97.5 % of cases."""

TOO_FAST = 1.3
"""Largest accepted ratio of the time of a call in blocks to the time that the kernel claims."""
RELEVANT = 1.03
"""Smallest ratio of times that matters for the choice of a kernel."""

MAXIMUM_AUTOCORRELATION = 0.75
"""Largest autocorrelation that is assumed, because few rounds cannot tell more from noise."""


class MedianInterval(NamedTuple):
    """Confidence interval of a median."""

    low: float
    high: float

    @property
    def noise(self) -> float:
        """Half the interval's width, relative to its middle."""
        return (self.high - self.low) / (self.high + self.low)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the `percent`-th percentile (0…100), interpolated between order statistics.

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


def summarize(
    samples: Sequence[float],
    interrupted: Iterable[int] = (),
    unconfirmed: float = 0.0,
    control: Sequence[float] = (),
) -> TimeSummary:
    """Summarise `samples` (milliseconds).

    Args:
        interrupted: rounds to leave out if at least `MINIMUM_ROUNDS` others remain.
        unconfirmed: share of the time by which the true time may be longer.
        control: times of the baseline in this kernel's process, in the same rounds (milliseconds).

    Raises:
        ValueError: there are no samples.
    """
    left_out = set(interrupted)
    used = [ms for at, ms in enumerate(samples) if at not in left_out]
    used = list(samples) if len(used) < MINIMUM_ROUNDS else used
    return TimeSummary(
        p10=percentile(used, 10),
        p50=percentile(used, 50),
        p90=percentile(used, 90),
        iqr=percentile(used, 75) - percentile(used, 25),
        n=len(used),
        samples=tuple(samples),
        interrupted=tuple(sorted(left_out)),
        unconfirmed=unconfirmed,
        control=tuple(control),
    )


def paired_ratios(baseline: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """Return baseline time / candidate time for every round that both kernels have.

    If the GPU's clock drifts from round to round, both times change, but their ratio does not.
    """
    return [before / after for before, after in zip(baseline, candidate, strict=False)]


def process_factor(control: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the ratio of the baseline's times in another process to those in its own process.

    It is at most `TOO_FAST` or its inverse, because a kernel can falsify the times in its process.
    """
    ratios = paired_ratios(control, baseline)
    return min(max(percentile(ratios, 50), 1 / TOO_FAST), TOO_FAST) if ratios else 1.0


def speedup_of(*calls: Sequence[float]) -> Speedup:
    """Return the speed-up over one or more calls, each with its paired ratios in round order."""
    ratio = percentile([ratio for ratios in calls for ratio in ratios], 50)
    interval = median_interval(*calls)
    if interval is None:
        return Speedup(ratio, None, None, "inconclusive", "too-few-rounds")
    return Speedup(ratio, *interval, *speed_verdict(*interval))


def speedup_between(*calls: tuple[TimeSummary, TimeSummary]) -> Speedup:
    """Return the speed-up over calls, from the times of the baseline and of the candidate.

    Rounds are left out if other programs interrupted one of their two samples. The speed-up is
    inconclusive if too few rounds remain. If the candidate's time may be too short (`unconfirmed`),
    the lower end of the interval falls, but not below `TOO_FAST`.

    If the kernels ran in two processes that differ (`process_factor`), the interval is extended to
    the ratio without this difference.
    """
    pairs, whole = [], []
    for baseline, candidate in calls:
        ratios = paired_ratios(baseline.samples, candidate.samples)
        left_out = {*baseline.interrupted, *candidate.interrupted}
        pairs.append(ratios)
        whole.append([ratio for at, ratio in enumerate(ratios) if at not in left_out])
    remaining, total = sum(map(len, whole)), sum(map(len, pairs))
    if remaining < min(MINIMUM_ROUNDS, total):
        found = speedup_of(*(whole if remaining else pairs))
        return replace(found, low=None, high=None, verdict="inconclusive", reason="interrupted")
    found = speedup_of(*whole)
    if found.low is None or found.high is None:
        return found
    confirmed = found.low / max(1 + candidate.unconfirmed for _, candidate in calls)
    low = max(confirmed, min(found.low, TOO_FAST))
    shifts = [after.process_factor / before.process_factor for before, after in calls]
    shift = percentile(shifts, 50)
    low, high = low * min(shift, 1.0), found.high * max(shift, 1.0)
    return Speedup(found.ratio, low, high, *speed_verdict(low, high))


def paired_speedup(baseline: Sequence[float], candidate: Sequence[float]) -> Speedup:
    """Compare two kernels that were timed in the same rounds (milliseconds, by round)."""
    return speedup_of(paired_ratios(baseline, candidate))


def speed_verdict(low: float, high: float) -> tuple[SpeedVerdict, SpeedReason]:
    """Return the verdict on a ratio's interval, and its reason, from the first line that applies:

        low, high                      verdict       reason
        both between 1/1.03 and 1.03   same          within-3-percent       1.01-1.02
        low > 1                        fast          interval-above-1       1.01-1.10
        high < 1                       slow          interval-below-1       0.90-0.99
        low ≤ 1/1.03, high ≥ 1.03      inconclusive  noisy                  0.90-1.10
        otherwise                      inconclusive  interval-includes-1    0.98-1.05

    So a difference of more than 3 % is never `same` if the interval contains the true ratio.
    """
    if low > 1 / RELEVANT and high < RELEVANT:
        return "same", "within-3-percent"
    if low > 1:
        return "fast", "interval-above-1"
    if high < 1:
        return "slow", "interval-below-1"
    is_noisy = low <= 1 / RELEVANT and high >= RELEVANT
    return "inconclusive", "noisy" if is_noisy else "interval-includes-1"


def median_interval(*series: Sequence[float]) -> MedianInterval | None:
    """Return the median's interval (module docstring) for positive samples of one or more series.

    Beyond the smallest and largest sample, ranks are extrapolated by the mean distance between the
    samples' logarithms. The result is None for fewer than `MINIMUM_ROUNDS` samples.
    """
    samples = [sample for samples in series for sample in samples]
    if len(samples) < MINIMUM_ROUNDS:
        return None
    return _order_interval(samples, _autocorrelation(series))


def independent_interval(samples: Sequence[float]) -> MedianInterval | None:
    """Return the median's interval for independent positive samples."""
    return None if len(samples) < MINIMUM_ROUNDS else _order_interval(samples, 0.0)


def _order_interval(samples: Sequence[float], correlation: float) -> MedianInterval:
    ordered, count = sorted(samples), len(samples)
    middle = (count + 1) / 2
    reach = (middle - _rank(count)) * math.sqrt((1 + correlation) / (1 - correlation))
    rank = middle - reach
    if rank >= 1:
        return MedianInterval(ordered[int(rank) - 1], ordered[count - int(rank)])
    smallest, largest = ordered[0], ordered[-1]
    beyond = (largest / smallest) ** ((1 - rank) / (count - 1))
    return MedianInterval(smallest / beyond, largest * beyond)


def ratio_interval(
    above: float, above_within: MedianInterval, below: float, below_within: MedianInterval
) -> MedianInterval:
    """Return the interval of the ratio `above / below` of two independent positive figures.

    On a logarithmic scale, the squared distances from each figure to the end of its interval are
    added (Zou and Donner 2008, method of variance estimates recovery). In simulations the result
    covers 95 % (`tests/replay/timing/test_coverage.py`). A plain sum of the distances would make
    the interval 1.5 times as wide.
    """
    ratio = above / below
    down = math.hypot(log_ratio(above, above_within.low), log_ratio(below_within.high, below))
    up = math.hypot(log_ratio(above_within.high, above), log_ratio(below, below_within.low))
    return MedianInterval(ratio * math.exp(-down), ratio * exp(up))


def log_ratio(above: float, below: float) -> float:
    """Return log(above / below) of two positive figures, even if the ratio is too large."""
    return math.log(above) - math.log(below)


def exp(value: float) -> float:
    """Return e to a power; infinity if the result is too large."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _rank(count: int) -> int:
    """Return the largest k for which the k-th smallest and k-th largest samples enclose 97.5 %.

    The result is at least 1.
    """
    rank, ways = 0, 1
    at_most = ways  # of 2**count outcomes: at most `rank` samples below the median
    while at_most * ONE_IN <= 2**count:
        rank += 1
        ways = ways * (count - rank + 1) // rank
        at_most += ways
    return max(rank, 1)


def _autocorrelation(series: Sequence[Sequence[float]]) -> float:
    """Estimate the correlation of consecutive rounds, from 0 to `MAXIMUM_AUTOCORRELATION`.

    The estimate is the correlation r of ranks, which outliers hardly affect, plus two corrections.
    The first, (1 + 3r) / n, is the bias of an estimate from n rounds (Kendall 1954). The second,
    30 / n², allows for its scatter (from simulations).
    """
    product = square = 0.0
    for samples in series:
        ordered = sorted(samples)
        ranks = [
            bisect_left(ordered, sample) + bisect_right(ordered, sample) - len(samples)
            for sample in samples
        ]
        product += sum(rank * following for rank, following in pairwise(ranks))
        square += sum(rank * rank for rank in ranks)
    count = sum(map(len, series))
    found = product / square if square else 0.0
    found += (1 + 3 * found) * len(series) / count + 30 / count**2
    return min(max(found, 0.0), MAXIMUM_AUTOCORRELATION)
