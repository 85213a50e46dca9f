"""Function `report`, which makes an HTML page and charts for papers from the rows of a replay."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.storage.json_data import parsed
from capture.storage.plain_files import possible
from replay.api.measured_rows import Rowlike, rows_of
from replay.api.verify_model import as_json
from replay.rows.row_files import RowsError, rebuilt

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult
    from replay.plan.plan import Budget

CHECK_FIELDS = {"kernel", "model", "status", "measured", "prediction", "drift"}

Checks = str | os.PathLike[str] | Iterable["ModelResult | Mapping[str, Any]"]
"""Checks of models, as results or JSON objects, or the path of their file."""


def report(
    rows: Rowlike,
    out: str | os.PathLike[str] | None = None,
    *,
    charts: str | os.PathLike[str] | None = None,
    checks: Checks = (),
    outputs: str | os.PathLike[str] | None = None,
    budget: str | Budget | None = None,
    summary: str = "",
    command: str = "",
) -> list[Path]:
    """Write an HTML page, which needs no network, or charts for papers.

    Args:
        rows: rows of one type of device, or their file.
        out: the page to write.
        charts: a directory for charts, as SVG, PNG and Vega-Lite.
        checks: checks from `verify` to show on the page too, or their file.
        outputs: directory where `verify` saved the outputs of these checks.
        budget: error limit to draw on the page, such as `cosine=0.998`.
        summary: a sentence to show first on the page, such as that of a tuning.
        command: command to name at the foot of the page.

    Returns:
        The files that were written. There are no charts if the rows have no figures to draw.

    Raises:
        ReportError: there is nothing to report, or the page cannot be written.
        PlotError: the charts cannot be written.
        PlanError: the budget is invalid.
        RowsError: the rows or checks cannot be read.
        MissingPackage: the chart library is not installed.

    Example:
        >>> report("rows.jsonl", "report.html", budget="cosine=0.998")
    """
    from replay.plan.plan import parse_budget
    from replay.report.charts.chart_files import write_plots
    from replay.report.html.page_writer import ReportError, write_html

    if out is None and charts is None:
        raise ReportError("nothing to write: give out= for a page, or charts= for charts")
    limit = parse_budget(budget) if isinstance(budget, str) else budget
    found = rows_of(rows)
    written: list[Path] = []
    if out is not None:
        write_html(
            found,
            Path(out),
            checks=read_checks(checks),
            outputs=None if outputs is None else Path(outputs),
            budget=limit,
            summary=summary,
            command=command,
        )
        written.append(Path(out))
    if charts is not None:
        written += write_plots(found, Path(charts))
    return written


def read_checks(checks: Checks) -> Sequence[dict[str, Any]]:
    """Return the given checks, or the checks of the file whose path is given, as JSON objects.

    Raises:
        RowsError: the file cannot be read, or does not contain checks.
    """
    if isinstance(checks, str | os.PathLike):
        return [as_json(check) for check in stored_checks(Path(checks))]
    return [dict(check) if isinstance(check, Mapping) else as_json(check) for check in checks]


def stored_checks(path: Path) -> list[ModelResult]:
    """Return the checks of a file that `replay verify --checks` wrote.

    Raises:
        RowsError: the file cannot be read, or does not contain checks.
    """
    try:
        found = [parsed(line) for line in possible(path).read_text("utf-8").splitlines()]
        if not all(isinstance(check, dict) and check.keys() >= CHECK_FIELDS for check in found):
            raise ValueError("a line is not a check")
        return [_check(tree) for tree in found]
    except OSError as error:
        raise RowsError(
            f"cannot read {path}: {error.strerror}; name a file of `replay verify --checks`"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RowsError(
            f"{path} was not written by `replay verify --checks` of this version: give such a file"
        ) from error


def _check(tree: dict[str, Any]) -> ModelResult:
    from replay.end_to_end import drift
    from replay.end_to_end.model_check import ModelResult

    made = rebuilt(ModelResult, {name: tree[name] for name in tree.keys() - {"prediction_error"}})
    if made.drift:
        drift.cells(made.drift)  # figures that are shown together are all there
    found = made.prediction
    places = [] if found is None else [found.run, *found.phases.values()]
    times = [span.seconds for span in made.measured.values()]
    for place in places:
        figures = (place.old_seconds, place.new_seconds, place.speedup)
        times += [each.value for each in figures if each is not None]
    if not all(1e-100 < abs(time) < 1e100 for time in times):  # one is divided by another
        raise ValueError("a time or a speed-up that no model has")
    return made
