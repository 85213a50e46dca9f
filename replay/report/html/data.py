"""Data of the report's page: rows as columns, and figures pooled over a group's calls.

The page's script inserts all data as text, never as markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import adaptive_max_pool2d

from replay.plan.plan import Budget
from replay.report.groups import Group, common_and_own, place
from replay.report.html.error_bounds import as_error, noise_floor, tolerance, worst_error
from replay.report.matrix import Matrix
from replay.report.pooled import pooled_speedup, typical_time, worst
from replay.report.ranking import is_correct
from replay.rows.errors_of_output import Where
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
    "call.call_index",
    "reason",
    "speedup.verdict",
    "roof.tflops",
    "roof.gb_per_s",
    "roof.interrupted",
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


def page_data(rows: Sequence[Row], found: Matrix, budget: Budget | None) -> dict[str, Any]:
    """Return, as plain JSON, everything that the page draws from the rows.

    Args:
        found: matrix of exactly these rows.
    """
    groups = found.kinds
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
    _, names = common_and_own(groups)
    metric = "relative_l1" if budget is None else budget.metric
    errors = [worst_error(row, metric) for _, row in members]
    noise = _noise_floors(groups, metric)
    return {
        "groups": [_group(*each, noise, metric) for each in zip(groups, names, strict=True)],
        "pooled": [each for at in range(len(groups)) for each in _pooled(at, found, metric)],
        "metric": metric,
        "budget": budget and {"text": str(budget), "limit": as_error(budget.limit, metric)},
        "columns": {
            path: {
                "heading": heading,
                "meaning": meanings[path],
                "factor": 1e-6 if path.endswith("peak_bytes") else 1,
            }
            for path, heading in headings.items()
        },
        "rows": {path: [_short(leaf(tree, path)) for tree in trees] for path in headings}
        | {
            "group": [at for at, _ in members],
            "name": [str(row.id) for _, row in members],
            "place": [place(row.call) for _, row in members],
            "shape": [str(row.call.shape) for _, row in members],
            "of": [each and each.of for each in errors],
            "error": [each and _short(each.error) for each in errors],
            "units": [each and _short(each.units) for each in errors],
            "positions": [each and each.positions for each in errors],
            "flags": ["; ".join(row.flags) for _, row in members],
            "noise": [_short(noise[id(row)]) for _, row in members],
        },
        "fields": [each and each.where and _field(each.where) for each in errors],
        "levels": {"decade": DECADE, "least": LEAST, "first": FIRST_LEVEL, "nan": NOT_FINITE},
    }


def _group(group: Group, name: str, noise: dict[int, float | None], metric: str) -> dict[str, Any]:
    exact = [
        row
        for kernel, rows in group.rows.items()
        if group.class_of(kernel) == "exact"
        for row in rows
    ]
    return {
        "title": group.title,
        "short": name,
        "model": group.calls[0].model,
        "phase": group.calls[0].phase,
        "baseline": group.baseline,
        "noise": _largest(noise[id(row)] for row in exact),
        # So the errors of all correct exact kernels lie within the tolerance.
        "tolerance": _largest(tolerance(row, metric) for row in exact if row.is_correct),
    }


def _noise_floors(groups: Sequence[Group], metric: str) -> dict[int, float | None]:
    """Return the noise floor of each row's call, by the row's identity."""
    found = {}
    for group in groups:
        own = {row.call.name: row for row in group.rows.get(KernelId(group.baseline), ())}
        for row in (row for rows in group.rows.values() for row in rows):
            found[id(row)] = noise_floor(row, own.get(row.call.name), metric)
    return found


def _largest(figures: Iterable[float | None]) -> float | None:
    return _short(max((figure for figure in figures if figure is not None), default=None))


def _pooled(at: int, matrix: Matrix, metric: str) -> Iterator[dict[str, Any]]:
    """Yield the speed, speed-up and worst error of each kernel over the group's calls."""
    group = matrix.kinds[at]
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
        own = typical_time(group.rows.get(KernelId(group.baseline, kernel.environment), ()))
        # A wrong kernel has no speed-up; the ratio of the medians is where it is drawn.
        drawn = own.p50 / time.p50 if not (correct or speedup) and own and time else None
        yield {
            "group": at,
            "kernel": str(kernel),
            "class": group.class_of(kernel),
            "correct": correct,
            "outcome": matrix.cells[kernel, at].outcome,
            "reason": matrix.cells[kernel, at].reason,
            "status": next((row.status for row in rows if not row.is_correct), rows[0].status),
            "error": None if found is None else _short(as_error(found[0], metric)),
            "of_tolerance": _largest(row.accuracy.tolerance_ratio for row in ran if row.accuracy),
            "p10": time and _short(time.p10),
            "p50": time and _short(time.p50),
            "p90": time and _short(time.p90),
            "ratio": 1.0
            if kernel.name == group.baseline
            else _short(speedup.ratio if speedup else drawn),
            "low": speedup and _short(speedup.low),
            "high": speedup and _short(speedup.high),
        }


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


def _field(where: Where) -> list[str]:
    """Return levels of errors: one string per head, one character per range of queries or keys.

    If the map would exceed `FIELD`, each character shows the worst error of several places.
    """
    errors = torch.tensor(where.relative_l1).nan_to_num(nan=math.inf, posinf=math.inf)
    sizes = [min(most, size) for most, size in zip(FIELD, errors.shape, strict=True)]
    errors = adaptive_max_pool2d(errors[None], sizes)[0]
    levels = ord(FIRST_LEVEL) + (DECADE * (errors.clamp(min=LEAST) / LEAST).log10()).round()
    levels = levels.clamp(max=ord(NOT_FINITE) - 1).where(errors.isfinite(), ord(NOT_FINITE))
    return [bytes(line).decode("ascii") for line in levels.to(torch.uint8).tolist()]
