"""Plans of a tuning, each made for a limit on the total error of attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from replay.api.plan_model import exclusive_kernels

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.tune.search import Planner

EXACT = 1e-9
"""Smallest limit, as a share of the largest, if the model's own attention has no error."""


def planner_of(capture: CaptureRecord, rows: Sequence[Row]) -> tuple[Planner, float, float]:
    """Return the planner, and the smallest and largest limit that it is useful for.

    The limit is on the sum of `replay.plan.cells.error_energy` over the calls of a run. Only
    kernels that are together as exact as the model's own attention are within the smallest limit;
    the fastest kernel of every call is within the largest.
    """
    from replay.end_to_end.model_process import OWN
    from replay.plan.choose import WithinTotal
    from replay.plan.plan import Budget

    errors = [row.accuracy.reference.relative_l1 for row in rows if row.accuracy]
    budget = Budget("relative_l1", max(filter(math.isfinite, errors), default=0.0))
    maker = WithinTotal(rows, capture.census, budget, OWN, exclusive_kernels(rows))

    @cache
    def planner(limit: float) -> Plan:
        return maker.plan(limit)

    fastest = planner(sys.float_info.max).total_error
    assert fastest is not None
    high = fastest.error or EXACT
    return planner, min(max(maker.own_error, EXACT * high), high), high


def expected_trials(low: float, high: float) -> int:
    """Return the largest number of plans that a search between two limits judges."""
    from replay.tune.search import CLOSE, MOST_TRIALS

    if high <= low:
        return 1
    halvings = math.log2(max(math.log(high / low) / math.log(CLOSE), 1))
    return min(MOST_TRIALS, 2 + math.ceil(halvings))
