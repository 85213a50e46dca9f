"""Figures pooled over all rows of a group of calls."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from replay.report.groups import Group
from replay.rows.row import KernelId, Row, Speedup
from replay.timing.statistics import percentile, speed_verdict, speedup_between

T = TypeVar("T")


TimesField = Literal["time_ms", "backward_ms", "both_ms"]
SPEEDUPS: dict[TimesField, str] = {
    "time_ms": "speedup",
    "backward_ms": "backward_speedup",
    "both_ms": "both_speedup",
}
"""Field of the speed-up that compares each field of times."""


def ranked_by(rows: Iterable[Row]) -> TimesField:
    """Return the times that rank kernels: forward and backward together, if they were measured."""
    return "both_ms" if any(row.both_ms for row in rows) else "time_ms"


class Percentiles(NamedTuple):
    """Percentiles of times, in milliseconds."""

    p10: float
    p50: float
    p90: float


def typical_time(rows: Sequence[Row], field: TimesField | None = None) -> Percentiles | None:
    """Return each percentile's median over the calls; by default of `ranked_by`."""
    field = field or ranked_by(rows)
    times = [time for row in rows if (time := getattr(row, field)) is not None]
    if not times:
        return None
    return Percentiles(
        percentile([time.p10 for time in times], 50),
        percentile([time.p50 for time in times], 50),
        percentile([time.p90 for time in times], 50),
    )


def pooled_speedup(
    group: Group, kernel: KernelId, over: KernelId | None = None, field: TimesField | None = None
) -> Speedup | None:
    """Pool the paired speed-up over all rounds of all calls on which both kernels are correct.

    If the baseline's row comes from other rounds than the kernel's, the pooled ratio and interval
    are medians over the calls.

    Args:
        over: kernel to compare with; by default, the baseline in the kernel's own environment.
        field: times to compare; by default those of `ranked_by`.

    Returns:
        The speed-up; None for kernels of different environments or processes, whose rounds are not
        paired.
    """
    field = field or ranked_by(itertools.chain.from_iterable(group.rows.values()))
    baseline = KernelId(group.baseline, kernel.environment)
    partners = {row.call.name: row for row in group.rows.get(over or baseline, ())}
    calls = []
    for row in group.rows[kernel]:
        partner = partners.get(row.call.name)
        if partner is None or not (row.is_ranked and partner.is_ranked):
            continue
        if not row.shares_rounds(partner):
            return _typical_speedup(group, kernel, field) if over in (None, baseline) else None
        before, after = (getattr(each, field) for each in (partner, row))
        if before is not None and after is not None:
            calls.append((before, after))
    return speedup_between(*calls) if calls else None


def _typical_speedup(group: Group, kernel: KernelId, field: TimesField) -> Speedup | None:
    speedups = [getattr(row, SPEEDUPS[field]) for row in group.rows[kernel] if row.is_correct]
    found = [each for each in speedups if each and each.vs == group.baseline]
    if not found:
        return None
    ratio = percentile([each.ratio for each in found], 50)
    lows = [each.low for each in found if each.low is not None]
    highs = [each.high for each in found if each.high is not None]
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
