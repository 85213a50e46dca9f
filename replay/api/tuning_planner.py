"""Plans of a tuning, each made for a limit on the error of attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from replay.api.plan_model import choose_plan

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.tune.search import Planner


def planner_of(capture: CaptureRecord, rows: Sequence[Row]) -> tuple[Planner, float, float]:
    """Return the planner, and the smallest and largest limit that it is useful for.

    The limit is on the relative L1 error of every call of attention. It never excludes the model's
    own attention, so the smallest limit is the largest error of that.
    """
    from replay.end_to_end.model_process import OWN
    from replay.plan.call_matching import RowsByCall
    from replay.plan.plan import Budget

    own = RowsByCall(rows, OWN)

    def errors(rows: Iterable[Row | None]) -> list[float]:
        found = [row.accuracy.reference.relative_l1 for row in rows if row and row.accuracy]
        return [error for error in found if math.isfinite(error)]

    low = max(errors(own.own_row(row.call.name) for row in rows), default=0.0)
    low = max(low, 1e-12)
    high = max(errors(row for row in rows if row.status == "ok"), default=low)

    @cache
    def planner(limit: float) -> Plan:
        return choose_plan(capture, rows, Budget("relative_l1", limit)).plan

    return planner, low, max(low, high)


def expected_trials(low: float, high: float) -> int:
    """Return the largest number of plans that a search between two limits judges."""
    from replay.tune.search import CLOSE, MOST_TRIALS

    if high <= low:
        return 1
    halvings = math.log2(max(math.log(high / low) / math.log(CLOSE), 1))
    return min(MOST_TRIALS, 2 + math.ceil(halvings))
