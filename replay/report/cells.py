"""Table cells, which summarise one kernel's rows over several calls."""

from __future__ import annotations

from typing import Any

from replay.report.groups import Group
from replay.report.pooled import (
    SPEEDUPS,
    TimesField,
    pooled_speedup,
    statuses,
    typical_time,
    worst,
)
from replay.rows.fields import COLUMNS
from replay.rows.row import UNCONFIRMED, KernelId, Row, Speedup
from replay.timing.statistics import percentile

MOST_DIGITS = 4
"""Maximum number of decimals in a speed-up whose interval ends close to 1."""


def cell(path: str, group: Group, kernel: KernelId, errors_against: str = "reference") -> str:
    """Format a cell; return `-` if there is no value.

    Args:
        path: dotted path of the field to show, from `replay.rows.fields.COLUMNS`.
        errors_against: output that errors are relative to: `reference`, `captured` or a kernel.
    """
    column, rows = COLUMNS[path], group.rows[kernel]
    if column.over_calls == "counts":
        return statuses(rows)
    if column.over_calls == "range":
        time = typical_time(rows, "time_ms")
        return f"{column.form(time.p10)}-{column.form(time.p90)}" if time else "-"
    if column.over_calls == "pooled":
        speedup = path.partition(".")[0]
        return _speedup(group, kernel, next(each for each in SPEEDUPS if SPEEDUPS[each] == speedup))
    if path.startswith("accuracy.reference.") and errors_against != "reference":
        field = "captured" if errors_against == "captured" else "kernel"
        path = path.replace("reference", field)
    values = [value for row in rows if (value := _value(row, path)) is not None]
    if not values:
        return "-"
    if column.over_calls == "same":
        return str(values[0])
    if column.over_calls == "median":
        return column.form(percentile(values, 50))
    sign = 1 if column.over_calls == "highest" else -1
    found = worst(rows, lambda row: _value(row, path), lambda value: sign * value)
    return "-" if found is None else column.form(found[0])


def speedup_text(speedup: Speedup) -> str:
    """Format a speed-up as `1.25× (1.21-1.30)`, `1.00× same`, `1.02× ? (0.95-1.10)` or similar.

    The ends of an interval have enough decimals to differ from 1. The question mark indicates an
    inconclusive verdict.
    """
    if speedup.low is None or speedup.high is None:
        return "busy machine" if speedup.reason == "interrupted" else "too few rounds"
    if speedup.verdict == "same":
        return f"{speedup.ratio:.2f}× same"
    if speedup.verdict == "inconclusive":
        high = f"{speedup.high:.2f}" if speedup.high < 10 else f"{speedup.high:.0f}"
        return f"{speedup.ratio:.2f}× ? ({speedup.low:.2f}-{high})"
    digits = 2
    while digits < MOST_DIGITS and 1 in (round(speedup.low, digits), round(speedup.high, digits)):
        digits += 1
    return f"{speedup.ratio:.{digits}f}× ({speedup.low:.{digits}f}-{speedup.high:.{digits}f})"


def model_speedup_text(speedup: Speedup) -> str:
    """Format a model's speed-up as `1.25× (1.21-1.30)`, `0.99× (0.98-1.02) same` or similar.

    The question mark indicates an inconclusive interval.
    """
    text = interval_text(speedup.ratio, speedup.low, speedup.high)
    if speedup.verdict == "same":
        return f"{text} same"
    return f"{text} ?" if speedup.holds(1.0) else text


def interval_text(value: float, low: float | None, high: float | None) -> str:
    """Format a speed-up and its 95 % interval; the ends are None after too few rounds."""
    within = ", too few rounds" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
    return f"{value:.2f}×{within}"


def _speedup(group: Group, kernel: KernelId, field: TimesField) -> str:
    if kernel.name == group.baseline:
        return "baseline" if any(getattr(row, field) for row in group.rows[kernel]) else "-"
    if not all(row.is_correct for row in group.rows[kernel]):
        return "-"
    if any(row.is_unconfirmed for row in group.rows[kernel]):
        return UNCONFIRMED
    speedup = pooled_speedup(group, kernel, field=field)
    return "-" if speedup is None else speedup_text(speedup)


def _value(row: Row, path: str) -> Any:
    value: Any = row
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
