"""Bounds that errors are drawn against: the noise floor of a call and the tolerance of a kernel."""

from __future__ import annotations

import math

from replay.rows.row import Row


def as_error(figure: float, metric: str) -> float:
    """Return a figure as an error whose best value is 0; a cosine becomes its distance from 1."""
    return max(1 - figure, 0.0) if metric == "cosine" else figure


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
