"""Change of a kernel's accuracy between two runs, judged from the errors at each place.

A place is a head in one of up to 64 ranges of queries (`accuracy.where.relative_l1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from replay.rows.errors_of_output import Errors
from replay.rows.row import Row
from replay.timing.statistics import exp, log_ratio, median_interval

AccuracyVerdict = Literal["same", "better", "worse", "inconclusive"]

AccuracyReason = Literal[
    "identical",
    "within-10-percent",
    "error-grew",
    "error-shrank",
    "error-grew-in-one-place",
    "more-nan",
    "fewer-nan",
    "now-inaccurate",
    "now-ok",
    "interval-includes-1",
    "too-few-places",
]

RELEVANT = 1.1
"""Minimum ratio of two errors that counts as a change."""

DOUBLED = 2.0
"""Minimum growth of the error at which a single place can stand out."""

DEVIATIONS = 6.0
"""Minimum distance from the median growth, in standard deviations, at which a place stands out."""

MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


@dataclass(frozen=True)
class AccuracyChange:
    """Ratio of the later run's error to the earlier run's, with a 95 % interval if available."""

    ratio: float
    low: float | None
    high: float | None
    verdict: AccuracyVerdict
    reason: AccuracyReason
    place: tuple[int, int] | None = None
    """Head (counted over batches) and query range of the only place that went wrong."""


class _Place(NamedTuple):
    head: int
    queries: int
    before: float
    after: float

    @property
    def growth(self) -> float:
        """Logarithm of `after / before`; infinite if only one of the errors is zero."""
        if self.after == self.before:
            return 0.0
        if min(self.before, self.after) <= 0:
            return math.inf if self.after > 0 else -math.inf
        return log_ratio(self.after, self.before)


def compare_accuracy(before: Row, after: Row) -> AccuracyChange | None:
    """Compare the errors of a kernel on a call; None if either row has no errors."""
    if before.accuracy is None or after.accuracy is None:
        return None
    old, new = before.accuracy.reference, after.accuracy.reference
    # Compare `repr`, in which NaN equals NaN.
    if before.accuracy.where == after.accuracy.where and repr(old) == repr(new):
        found = AccuracyChange(1.0, 1.0, 1.0, "same", "identical")
    else:
        found = _judged(_places(before, after), _ratio(old.relative_l1, new.relative_l1))
    if before.status != after.status and "inaccurate" in (before.status, after.status):
        if after.status == "inaccurate":
            return replace(found, verdict="worse", reason="now-inaccurate")
        return replace(found, verdict="better", reason="now-ok")
    more = _nonfinite(new) - _nonfinite(old)
    if more > 0:
        return replace(found, verdict="worse", reason="more-nan")
    return replace(found, verdict="better", reason="fewer-nan") if more < 0 else found


def _judged(places: Sequence[_Place], ratio: float) -> AccuracyChange:
    """Judge by the errors of the places, or by the whole error if there are too few places."""
    # One wrong place does not move the median, so test the largest growth on its own too.
    alone = _gone_wrong_alone(places)
    finite = [each.growth for each in places if math.isfinite(each.growth)]
    within = median_interval([exp(each) for each in finite])
    if within is None:
        if alone is None and 1 / DOUBLED <= ratio <= DOUBLED:
            return AccuracyChange(ratio, None, None, "inconclusive", "too-few-places")
        if alone is not None or ratio > 1:
            return AccuracyChange(ratio, None, None, "worse", "error-grew")
        return AccuracyChange(ratio, None, None, "better", "error-shrank")
    low, high = within
    typical = exp(median(finite))
    if low > 1 and high >= RELEVANT:
        return AccuracyChange(typical, low, high, "worse", "error-grew")
    if alone is not None:
        place = (alone.head, alone.queries)
        grown = _ratio(alone.before, alone.after)
        return AccuracyChange(grown, None, None, "worse", "error-grew-in-one-place", place)
    if low > 1 / RELEVANT and high < RELEVANT:
        return AccuracyChange(typical, low, high, "same", "within-10-percent")
    if high < 1:
        return AccuracyChange(typical, low, high, "better", "error-shrank")
    return AccuracyChange(typical, low, high, "inconclusive", "interval-includes-1")


def _gone_wrong_alone(places: Sequence[_Place]) -> _Place | None:
    """Return the place whose error grew most, if that error doubled, stands out and is not tiny."""
    if not places:
        return None
    worst = max(places, key=lambda each: each.growth)
    growths = [each.growth for each in places]
    middle = median(growths)
    if not math.isfinite(middle):
        return None
    deviation = MAD_TO_DEVIATION * median(abs(each - middle) for each in growths)
    stands_out = worst.growth - middle > max(DEVIATIONS * deviation, math.log(DOUBLED))
    matters = worst.after > median(each.before for each in places)
    return worst if stands_out and matters and worst.growth > math.log(DOUBLED) else None


def _places(before: Row, after: Row) -> list[_Place]:
    """Return both errors of each place (head and query range) where both are finite."""
    old = before.accuracy.where if before.accuracy else None
    new = after.accuracy.where if after.accuracy else None
    if old is None or new is None:
        return []
    return [
        _Place(head, queries, one, other)
        for head, (ones, others) in enumerate(zip(old.relative_l1, new.relative_l1, strict=False))
        for queries, (one, other) in enumerate(zip(ones, others, strict=False))
        if math.isfinite(one) and math.isfinite(other)
    ]


def _nonfinite(errors: Errors) -> int:
    return errors.nan_count + errors.inf_count + errors.mismatched_nonfinite


def _ratio(before: float, after: float) -> float:
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 1.0
    return after / before if before else math.inf
