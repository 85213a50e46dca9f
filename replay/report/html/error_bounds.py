"""Errors that are drawn, and their bounds: the noise floor of a call and a kernel's tolerance."""

from __future__ import annotations

import math
from typing import NamedTuple

from capture.call.gradients import GRADIENTS
from replay.rows.errors_of_output import Where
from replay.rows.row import Row


def as_error(figure: float, metric: str) -> float:
    """Return a figure as an error whose best value is 0; a cosine becomes its distance from 1."""
    return max(1 - figure, 0.0) if metric == "cosine" else figure


class WorstError(NamedTuple):
    """Largest error of a row, in units of its tolerance."""

    of: str
    """`output`, `grad_query`, `grad_key` or `grad_value`."""
    error: float
    units: float | None
    where: Where | None
    positions: int
    """Number of queries, or of keys for their gradients, that the errors have places in."""


def worst_error(row: Row, metric: str) -> WorstError | None:
    """Return the worst error, of the output if in doubt; None if the kernel returned no output.

    Errors of gradients are relative L1, whatever the metric.
    """
    if (found := row.accuracy) is None:
        return None
    error, shape = as_error(getattr(found.reference, metric), metric), row.call.shape
    worst = WorstError("output", error, found.tolerance_ratio, found.where, shape.q_len)
    for name, each in vars(row.gradients).items() if row.gradients else ():
        if worst.units is not None and each.tolerance_ratio > worst.units:
            length = shape.q_len if name == "query" else shape.kv_len
            figures = each.relative_l1, each.tolerance_ratio, each.where
            worst = WorstError(GRADIENTS[name], *figures, length)
    return worst


def noise_floor(row: Row, baseline: Row | None, metric: str) -> float | None:
    """Return the error of the recorded output, or of the baseline if none was recorded.

    Args:
        baseline: row of the baseline on the same call, if there is one.

    Returns:
        The error; None if it is 0, not a number or unknown.
    """
    recorded = row.accuracy and row.accuracy.noise_floor
    own = baseline and baseline.accuracy and baseline.accuracy.reference
    found = recorded or own
    if not found:
        return None
    error = as_error(getattr(found, metric), metric)
    return error if 0 < error < math.inf else None


def tolerance(row: Row, metric: str) -> float | None:
    """Return the error at which an output would fail if all its errors grew by one factor.

    The verdict compares single elements and rows with their limits, and the row stores the largest
    ratio. The distance of a cosine from 1 grows with the square of the factor. None for an output
    without an error, and for rows of earlier versions, which do not store the ratio.
    """
    if row.accuracy is None:
        return None
    errors = row.accuracy.chosen or row.accuracy.reference
    error, ratio = as_error(getattr(errors, metric), metric), row.accuracy.tolerance_ratio
    if not ratio or not 0 < error / ratio < math.inf:
        return None
    return float(error / ratio ** (2 if metric == "cosine" else 1))
