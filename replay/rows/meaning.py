"""Meanings of a row's fields, which each field declares as `Annotated[type, Meaning(...)]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

COSINE_NOISE = 1e-12
"""Uncertainty of a cosine against a float32 or float64 reference."""

FEW_ROUNDS = 10
"""Minimum number of rounds for which tables show a dash instead of the number."""

OverCalls = Literal["median", "range", "lowest", "highest", "pooled", "counts", "same"]
"""Rule by which a table cell combines the values of several calls."""


class Column(NamedTuple):
    """Column of a table that shows a field."""

    table: Literal["speed", "training", "gradients", "accuracy", "work", "machine"]
    metric: str
    """Value of `--metric` with which the column is shown."""
    heading: str
    form: Callable[[float], str] = str
    over_calls: OverCalls = "median"
    of: str = ""
    """Name of the subfield to show, if the field has subfields."""


class Meaning(NamedTuple):
    """Meaning of a field."""

    text: str
    """Explanation in one line. If the field has subfields, `{}` stands for a subfield's text."""
    unit: str = ""
    columns: tuple[Column, ...] = ()


def digits(spec: str, factor: float = 1.0) -> Callable[[float], str]:
    """Return a function that formats a column's values as `format(value * factor, spec)`."""
    return lambda value: format(value * factor, spec)


def floored(places: int) -> Callable[[float], str]:
    """Return a function that rounds cosines down, so that only 1 (within noise) is shown as 1."""

    def form(value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        return f"{math.floor((value + COSINE_NOISE) * 10**places) / 10**places:.{places}f}"

    return form


def nonzero(value: float) -> str:
    """Format a count; return a dash for zero."""
    return str(value) if value else "-"


def few(value: float) -> str:
    """Format a number of rounds; return a dash if it is at least `FEW_ROUNDS`."""
    return str(value) if value < FEW_ROUNDS else "-"
