"""Data of the report's page: rows as columns, and figures pooled over a group's calls.

The page's script inserts all data as text, never as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import adaptive_max_pool2d

from replay.plan.plan import Budget
from replay.report.groups import Group, joined, place, told_apart
from replay.report.pooled import pooled_speedup, typical_time, worst
from replay.report.ranking import is_correct
from replay.rows.fields import COLUMNS, FIELDS, leaf
from replay.rows.row import KernelId, Row
from replay.rows.row_files import row_to_json

FIGURES = {
    "time_ms.p50": "ms",
    "time_ms.p10": "p10 ms",
    "time_ms.p90": "p90 ms",
    "time_ms.n": "n",
    "speedup.ratio": "speed-up",
    "speedup.low": "from",
    "speedup.high": "to",
}
"""Headings of the table's first columns; other columns of `replay.rows.fields` follow."""
FACTS = (
    "call.name",
    "call.model",
    "call.phase",
    "call.module",
    "call.step",
    "call.dtype",
    "reason",
    "roof.tflops",
    "roof.gb_per_s",
)
"""Fields that the charts need although the table has no column for them."""

FIELD = (32, 32)
"""Maximum number of heads, and of query ranges, in a stored map of errors."""
DECADE = 8
"""Number of error levels per power of ten in a stored map of errors."""
LEAST = 1e-9
"""Error at the lowest level."""
FIRST_LEVEL = "0"
"""Character for the lowest error level; each higher level uses the next character."""
NOT_FINITE = "~"


def page_data(
    rows: Sequence[Row], groups: Sequence[Group], budget: Budget | None
) -> dict[str, Any]:
    """Return, as plain JSON, everything that the page draws from the rows.

    Args:
        groups: groups of exactly these rows (`replay.report.groups.group_rows`).
    """
    headings = {path: FIGURES.get(path, column.heading) for path, column in COLUMNS.items()}
    headings = FIGURES | headings | dict.fromkeys(FACTS, "")
    # Map rows to groups by identity, because two rows may be equal.
    group_of = {
        id(row): at
        for at, group in enumerate(groups)
        for rows_of_kernel in group.rows.values()
        for row in rows_of_kernel
    }
    members = [
        (group_of[id(row)], row)
        for row in rows
        if id(row) in group_of and row.status != "unavailable"
    ]
    trees = [row_to_json(_without_series(row)) for _, row in members]
    meanings = {field.path: field.meaning for field in FIELDS}
    metric = "relative_l1" if budget is None else budget.metric
    return {
        "groups": _groups(groups),
        "pooled": [each for at, group in enumerate(groups) for each in _pooled(at, group, metric)],
        "metric": metric,
        "budget": budget and {"text": str(budget), "limit": _error(budget.limit, metric)},
        "columns": {
            path: {
                "heading": heading,
                "meaning": meanings[path],
                "factor": 1e-6 if path == "peak_bytes" else 1,
            }
            for path, heading in headings.items()
        },
        "rows": {path: [_short(leaf(tree, path)) for tree in trees] for path in headings}
        | {
            "group": [at for at, _ in members],
            "name": [str(row.id) for _, row in members],
            "place": [place(row.call) for _, row in members],
            "shape": [str(row.call.shape) for _, row in members],
            "flags": ["; ".join(row.flags) for _, row in members],
        },
        "fields": [_field(row) for _, row in members],
        "levels": {"decade": DECADE, "least": LEAST, "first": FIRST_LEVEL, "nan": NOT_FINITE},
    }


def _groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    short = [
        joined(each.model, each.phase, each.shape, each.dtype, each.mask, each.place)
        for each in groups
    ]
    return [
        {
            "title": group.title,
            "short": name,
            "model": group.calls[0].model,
            "phase": group.calls[0].phase,
            "baseline": group.baseline,
        }
        for group, name in zip(groups, told_apart(groups, short), strict=True)
    ]


def _pooled(at: int, group: Group, metric: str) -> Iterator[dict[str, Any]]:
    """Yield the speed, speed-up and worst error of each kernel over the group's calls."""
    for kernel, rows in group.rows.items():
        time, ran = typical_time(rows), [row for row in rows if row.accuracy]
        if not ran:
            continue
        found = worst(
            ran,
            lambda row: row.accuracy and getattr(row.accuracy.reference, metric),
            lambda figure: -figure if metric == "cosine" else figure,
        )
        speedup = None if kernel == KernelId(group.baseline) else pooled_speedup(group, kernel)
        correct = is_correct(group, kernel)
        yield {
            "group": at,
            "kernel": str(kernel),
            "class": group.class_of(kernel),
            "correct": correct,
            "status": next((row.status for row in rows if not row.is_correct), rows[0].status),
            "error": None if found is None else _short(_error(found[0], metric)),
            "p10": time and _short(time.p10),
            "p50": time and _short(time.p50),
            "p90": time and _short(time.p90),
            "ratio": 1.0 if kernel.name == group.baseline else speedup and _short(speedup.ratio),
            "low": speedup and _short(speedup.low),
            "high": speedup and _short(speedup.high),
        }


def _error(figure: float, metric: str) -> float:
    """Return a figure as an error whose best value is 0; a cosine becomes its distance from 1."""
    return max(1 - figure, 0.0) if metric == "cosine" else figure


def _short(value: Any) -> Any:
    """Drop digits that are not shown; keep more for cosines, whose last digits matter."""
    if isinstance(value, float):
        return float(f"{value:.9g}" if 0.99 < abs(value) <= 1 else f"{value:.5g}")
    return value


def _without_series(row: Row) -> Row:
    """Drop long parts that the page does not show: samples and the errors by place."""
    time = row.time_ms and replace(row.time_ms, samples=())
    core = row.core_time_ms and replace(row.core_time_ms, samples=())
    accuracy = row.accuracy and replace(row.accuracy, where=None)
    return replace(row, time_ms=time, core_time_ms=core, layer_host_ms=None, accuracy=accuracy)


def _field(row: Row) -> list[str] | None:
    """Return the error levels of an output: one string per head, one character per query range.

    If the map would exceed `FIELD`, each character shows the worst error of several places.
    """
    where = None if row.accuracy is None else row.accuracy.where
    if where is None:
        return None
    errors = torch.tensor(where.relative_l1).nan_to_num(nan=math.inf, posinf=math.inf)
    sizes = [min(most, size) for most, size in zip(FIELD, errors.shape, strict=True)]
    errors = adaptive_max_pool2d(errors[None], sizes)[0]
    levels = ord(FIRST_LEVEL) + (DECADE * (errors.clamp(min=LEAST) / LEAST).log10()).round()
    levels = levels.clamp(max=ord(NOT_FINITE) - 1).where(errors.isfinite(), ord(NOT_FINITE))
    return [bytes(line).decode("ascii") for line in levels.to(torch.uint8).tolist()]
