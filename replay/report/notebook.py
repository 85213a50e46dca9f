"""Rows as notebooks show them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from capture.text.html_table import html_table
from replay.report.cells import speedup_text
from replay.report.groups import place
from replay.rows.row import Row
from replay.rows.row_files import RowsError, read_jsonl

HEADINGS = (
    *("kernel", "model", "call", "B×H×S×D", "time ms", "speed-up", "TFLOPS"),
    *("cosine", "rel L1", "status", "reason"),
)


class Rows(list[Row]):
    """A list of rows that a notebook shows as a table.

    Example:
        >>> rows = Rows(replay(workloads, kernels, settings))
        >>> rows  # the last line of a cell
    """

    def __repr__(self) -> str:
        kernels = len({row.id for row in self if row.kernel})
        calls = len({row.call.name for row in self})
        return f"Rows(rows={len(self)}, kernels={kernels}, calls={calls})"

    def _repr_html_(self) -> str:
        return html_table(HEADINGS, [_line(row) for row in self], [repr(self)])


def read_rows(path: str | os.PathLike[str]) -> Rows:
    """Read the rows that `replay --json` wrote.

    Warns:
        UserWarning: the file ends within a row, because its replay was interrupted.

    Raises:
        RowsError: there is none, or it holds something other than rows of this version.
    """
    if not isinstance(path, str | os.PathLike):
        raise RowsError(f"rows are read from a file, not from {type(path).__name__}: give its path")
    try:
        rows, is_cut_off = read_jsonl(Path(path))
    except FileNotFoundError as error:
        raise RowsError(f"there is no file {path}: write one with `replay --json FILE`") from error
    if is_cut_off:
        warnings.warn(f"{path} ends within a row: its replay was interrupted", stacklevel=2)
    return Rows(rows)


def _line(row: Row) -> tuple[object, ...]:
    errors = None if row.accuracy is None else row.accuracy.reference
    return (
        str(row.id),
        row.call.model,
        place(row.call),
        str(row.call.shape),
        row.time_ms and row.time_ms.p50,
        speedup_text(row.speedup) if row.speedup else "",
        row.tflops,
        errors and f"{errors.cosine:.6f}",
        errors and f"{errors.relative_l1:.1e}",
        row.status,
        "" if row.is_correct else row.reason,
    )
