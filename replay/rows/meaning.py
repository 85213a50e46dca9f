"""What the fields of a row mean, written beside each field as `Annotated[type, Meaning(...)]`.

CSV's columns, the tables, `--metric` and the docs' lists all come from it (`replay.rows.fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

COSINE_NOISE = 1e-12
"""What a cosine against a float32 or float64 reference is uncertain by."""

FEW_ROUNDS = 10
"""Fewer than these stand in the tables."""

OverCalls = Literal["median", "range", "lowest", "highest", "pooled", "counts", "same"]
"""How one cell of a table combines several calls."""

OVER_CALLS: dict[OverCalls, str] = {
    "median": "the median of the calls",
    "range": "the median of the calls",
    "lowest": "the worst of the calls",
    "highest": "the worst of the calls",
    "pooled": "all rounds of all calls together",
    "counts": "of every call",
    "same": "the same for every call",
}
"""The same for readers."""


class Column(NamedTuple):
    """A column of the tables."""

    table: Literal["speed", "accuracy", "work", "machine"]
    metric: str
    """The `--metric` that shows it."""
    heading: str
    form: Callable[[float], str] = str
    over_calls: OverCalls = "median"
    of: str = ""
    """Which leaf of a field that has several."""


class Meaning(NamedTuple):
    """What a field says."""

    text: str
    """In one line. Around a field that has fields of its own, `{}` stands for theirs."""
    unit: str = ""
    columns: tuple[Column, ...] = ()


def digits(spec: str, factor: float = 1.0) -> Callable[[float], str]:
    """A column's form: `format(value * factor, spec)`."""
    return lambda value: format(value * factor, spec)


def floored(places: int) -> Callable[[float], str]:
    """A cosine's form: only an exact 1, but for float64's own noise, reads 1.000000."""

    def form(value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        return f"{math.floor((value + COSINE_NOISE) * 10**places) / 10**places:.{places}f}"

    return form


def nonzero(value: float) -> str:
    """A count's form: a dash for none."""
    return str(value) if value else "-"


def few(value: float) -> str:
    """The form of a number of rounds: a dash where there are enough to look away from it."""
    return str(value) if value < FEW_ROUNDS else "-"
