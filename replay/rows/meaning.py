"""The meanings of a row's fields, written with each field as `Annotated[type, Meaning(...)]`.

CSV columns, tables, `--metric` and the lists in the docs are made from them (`replay.rows.fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

COSINE_NOISE = 1e-12
"""Uncertainty of a cosine against a float32 or float64 reference."""

FEW_ROUNDS = 10
"""Number of rounds from which tables do not show it."""

OverCalls = Literal["median", "range", "lowest", "highest", "pooled", "counts", "same"]
"""Rule by which one cell of a table combines several calls."""

OVER_CALLS: dict[OverCalls, str] = {
    "median": "the median of the calls",
    "range": "the median of the calls",
    "lowest": "the worst of the calls",
    "highest": "the worst of the calls",
    "pooled": "all rounds of all calls together",
    "counts": "of every call",
    "same": "the same for every call",
}
"""Descriptions of these rules for readers."""


class Column(NamedTuple):
    """Column of the tables."""

    table: Literal["speed", "accuracy", "work", "machine"]
    metric: str
    """Value of `--metric` that shows it."""
    heading: str
    form: Callable[[float], str] = str
    over_calls: OverCalls = "median"
    of: str = ""
    """Name of a leaf, for a field that has several."""


class Meaning(NamedTuple):
    """Meaning of a field."""

    text: str
    """Text in one line. In a field with fields of its own, `{}` stands for their texts."""
    unit: str = ""
    columns: tuple[Column, ...] = ()


def digits(spec: str, factor: float = 1.0) -> Callable[[float], str]:
    """Return a column's form: `format(value * factor, spec)`."""
    return lambda value: format(value * factor, spec)


def floored(places: int) -> Callable[[float], str]:
    """Return a cosine's form: only 1, within float64's noise, is shown as 1.000000."""

    def form(value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        return f"{math.floor((value + COSINE_NOISE) * 10**places) / 10**places:.{places}f}"

    return form


def nonzero(value: float) -> str:
    """Format a count, with a dash for zero."""
    return str(value) if value else "-"


def few(value: float) -> str:
    """Format a number of rounds, with a dash if it is large enough."""
    return str(value) if value < FEW_ROUNDS else "-"
