"""Plans of a tuning, each made for a limit on the total error of attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from replay.api.plan_model import exclusive_kernels

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.plan.cells import Cell
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.sketches.sketch import ErrorSketch
    from replay.sparsity.candidates import SparseCandidates
    from replay.tune.search import Planner

EXACT = 1e-9
"""Smallest limit, as a share of the largest, if the model's own attention has no error."""


def planner_of(
    capture: CaptureRecord,
    rows: Sequence[Row],
    sketch: ErrorSketch | None = None,
    *,
    sparse: SparseCandidates | None = None,
) -> tuple[Planner, float, float]:
    """Return the planner, and the smallest and largest limit that it is useful for.

    With a sketch, the limit is on the squared error of the final output that the sketch foretells;
    with a sketch by head, the errors of heads are weighted by the sensitivity of the output.
    Without one, it is on the sum of `replay.plan.cells.error_energy` over the calls of a run. Only
    kernels that are together as exact as the model's own attention are within the smallest limit;
    the fastest kernel of every call is within the largest.

    Args:
        sketch: sketch of the kernels of the rows, or of the sparse kernels by head.
        sparse: block-sparse kernels to choose from besides those of the rows.
    """
    from replay.end_to_end.model_process import OWN
    from replay.plan.choose import WithinTotal
    from replay.plan.plan import Budget

    errors = [row.accuracy.reference.relative_l1 for row in rows if row.accuracy]
    if sparse is not None:
        errors.append(sparse.largest_error)
    budget = Budget("relative_l1", max(filter(math.isfinite, errors), default=0.0))
    make = partial(WithinTotal, rows, capture.census, budget, OWN, exclusive_kernels(rows))
    energy_at = None if sketch is None or sparse is not None else partial(_foretold, sketch)
    maker = make(energy_at=energy_at, more=sparse)
    if sparse is not None and sketch is not None:
        from replay.sparsity.foretold_sensitivity import with_sensitivities

        maker = make(more=with_sensitivities(sparse, maker.cells, sketch))

    @cache
    def planner(limit: float) -> Plan:
        return maker.plan(limit)

    fastest = planner(sys.float_info.max).total_error
    assert fastest is not None
    high = fastest.error or EXACT
    return planner, min(max(maker.own_error, EXACT * high), high), high


def _foretold(sketch: ErrorSketch, cell: Cell, kernel: str) -> float:
    """Return the squared error of the final output that a kernel adds at a cell.

    It is unknown, NaN, at cells that the sketch does not have, such as the decoder of latents.
    """
    if kernel == cell.baseline:
        return 0.0
    places = [at for at, place in enumerate(sketch.places) if cell.covers(*place)]
    if not places or kernel not in sketch.kernels:
        return math.nan
    return float(sketch.additive[places, sketch.kernels.index(kernel)].sum())


def expected_trials(low: float, high: float) -> int:
    """Return the largest number of plans that a search between two limits judges."""
    from replay.tune.search import CLOSE, MOST_TRIALS

    if high <= low:
        return 1
    halvings = math.log2(max(math.log(high / low) / math.log(CLOSE), 1))
    return min(MOST_TRIALS, 2 + math.ceil(halvings))
