"""Figures pooled over all rows of a group of calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from replay.report.groups import Group
from replay.rows.row import KernelId, Row, Speedup
from replay.timing.statistics import percentile, speed_verdict, speedup_between

T = TypeVar("T")


class Percentiles(NamedTuple):
    """Percentiles of times, in milliseconds."""

    p10: float
    p50: float
    p90: float


def typical_time(rows: Sequence[Row]) -> Percentiles | None:
    """Return each percentile's median over the calls."""
    times = [row.time_ms for row in rows if row.time_ms is not None]
    if not times:
        return None
    return Percentiles(
        percentile([time.p10 for time in times], 50),
        percentile([time.p50 for time in times], 50),
        percentile([time.p90 for time in times], 50),
    )


def pooled_speedup(group: Group, kernel: KernelId, over: KernelId | None = None) -> Speedup | None:
    """Pool the paired speed-up over all rounds of all calls on which both kernels are correct.

    If the baseline's row comes from other rounds than the kernel's, the pooled ratio and interval
    are medians over the calls.

    Args:
        over: kernel to compare with; by default, the baseline in the kernel's own environment.

    Returns:
        The speed-up; None for kernels of different environments or processes, whose rounds are not
        paired.
    """
    baseline = KernelId(group.baseline, kernel.environment)
    partners = {row.call.name: row for row in group.rows.get(over or baseline, ())}
    calls = []
    for row in group.rows[kernel]:
        partner = partners.get(row.call.name)
        if partner is None or not (row.is_ranked and partner.is_ranked):
            continue
        if not row.shares_rounds(partner):
            return _typical_speedup(group, kernel) if over in (None, baseline) else None
        if row.time_ms is not None and partner.time_ms is not None:
            calls.append((partner.time_ms, row.time_ms))
    return speedup_between(*calls) if calls else None


def _typical_speedup(group: Group, kernel: KernelId) -> Speedup | None:
    speedups = [row.speedup for row in group.rows[kernel] if row.is_correct]
    found = [each for each in speedups if each and each.vs == group.baseline]
    if not found:
        return None
    ratio = percentile([speedup.ratio for speedup in found], 50)
    lows = [speedup.low for speedup in found if speedup.low is not None]
    highs = [speedup.high for speedup in found if speedup.high is not None]
    if not lows:
        return Speedup(ratio, None, None, "inconclusive", "too-few-rounds")
    low, high = percentile(lows, 50), percentile(highs, 50)
    return Speedup(ratio, low, high, *speed_verdict(low, high))


def worst(
    rows: Sequence[Row], figure: Callable[[Row], T | None], badness: Callable[[T], float]
) -> tuple[T, Row] | None:
    """Return the worst value of a figure over the rows, with its row; NaN is worst."""
    found = [(value, row) for row in rows if (value := figure(row)) is not None]
    if not found:
        return None

    def order(item: tuple[T, Row]) -> float:
        bad = badness(item[0])
        return math.inf if math.isnan(bad) else bad

    return max(found, key=order)


def statuses(rows: Sequence[Row]) -> str:
    """Count the rows' statuses, such as `8 ok, 2 inaccurate`; a single status has no count."""
    counts = Counter(row.status for row in rows)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())
