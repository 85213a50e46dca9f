"""Bounds that errors are drawn against: the noise floor of a call and the tolerance of a kernel.

A row keeps the verdict on its output, which compares single elements and rows, but not the limits.
These bounds are the nearest that a row's figures give.
"""

from __future__ import annotations

import math

from replay.accuracy.thresholds import ExactThresholds, QuantisedThresholds, Thresholds
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


def tolerance(row: Row, noise: float | None, metric: str) -> float | None:
    """Return the error that a kernel of the row's class may have.

    It is the limit of quantised kernels, and for others the noise floor times the factor by which
    exact kernels may exceed the same-dtype error (squared for the distance of a cosine from 1,
    which grows with the square of an error). None if there is neither.
    """
    limits = _thresholds(row).of(row.accuracy_class or "exact")
    if isinstance(limits, QuantisedThresholds):
        fixed = {"cosine": 1 - limits.minimum_cosine, "relative_l1": limits.maximum_relative_l1}
        return fixed.get(metric)
    return noise and noise * _factor(limits, metric)


def _factor(limits: ExactThresholds, metric: str) -> float:
    power = 2 if metric == "cosine" else 1
    return float(limits.same_dtype_factor**power)


def _thresholds(row: Row) -> Thresholds:
    """Return the thresholds that judged a row: the defaults, with its own changes."""
    tables: dict[str, dict[str, float]] = {}
    for change in row.tolerances.split():
        name, _, value = change.partition("=")
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = float(value)
    return Thresholds.from_tables(tables)
