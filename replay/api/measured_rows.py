"""Rows of a replay, as a list with methods for common questions and a table for notebooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capture.errors import MissingPackage
from capture.text.html_table import html_table
from capture.text.printable import printable
from replay.report.cells import speedup_text
from replay.report.groups import Group, group_rows, place
from replay.report.ranking import fastest
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.fields import FIELDS, leaf
from replay.rows.row import UNCONFIRMED, KernelId, Row
from replay.rows.row_files import RowsError, read_jsonl, row_to_json, save_jsonl

Rowlike = str | os.PathLike[str] | Iterable[Row]
"""Rows, or the path of their file."""

HEADINGS = (
    *("kernel", "model", "call", "B×H×S×D", "time ms", "speed-up", "TFLOPS"),
    *("cosine", "rel L1", "status", "reason"),
)


PRINTED = ("kernel", "call", "time ms", "speed-up", "status")
"""Columns that `print(rows)` shows."""
MOST_PRINTED = 20


class Rows(list[Row]):
    """Rows of a replay, one for each kernel and call; `print` and notebooks show a table.

    Example:
        >>> import attention_replay as ar
        >>> rows = ar.Rows.read("rows.jsonl")
        >>> for row in rows.best():
        ...     print(row.call.name, row.kernel)
    """

    def best(self, accuracy_class: AccuracyClass = "exact") -> Rows:
        """Return one row per call: the row of the kernel to use.

        Calls of equal cost get a joint decision from their paired rounds, as in `replay`'s tables.
        The kernel to use is the fastest one that is correct on all of these calls, does not change
        inputs that later calls read, and is faster than the baseline by more than the 95 % interval
        of its speed-up. If no kernel qualifies, the baseline is used if it is correct;
        otherwise the call has no row. Calls that were measured without a baseline get the fastest
        correct kernel. Where backward was measured, times are those of forward and backward.

        Args:
            accuracy_class: `exact`, or `quantised` for the fastest 8-bit kernel. For `sparse`
                kernels, speed does not show whether they keep enough keys.

        Returns:
            Rows in the order of the calls; rows of several devices follow one device after another.

        Raises:
            RowsError: the accuracy class is not `exact` or `quantised`.

        Example:
            >>> [(row.call.name, row.kernel) for row in rows.best()]
        """
        if accuracy_class not in ("exact", "quantised"):
            raise RowsError(f"invalid accuracy class {accuracy_class!r}: choose exact or quantised")
        by_device: dict[str, list[Row]] = {}
        for row in self:
            by_device.setdefault(row.machine.device, []).append(row)
        found = Rows()
        for rows in by_device.values():
            chosen = {
                row.call.name: row
                for group in group_rows(rows)
                for row in _best_of(group, accuracy_class)
            }
            names = dict.fromkeys(row.call.name for row in rows)
            found += [chosen[name] for name in names if name in chosen]
        return found

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with these rows and a column per field (docs/fields.md).

        A field without values gives an empty column.

        Raises:
            MissingPackage: pandas is not installed.

        Example:
            >>> rows.to_dataframe().groupby("kernel")["speedup.ratio"].median()
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingPackage("a data frame requires pandas: pip install pandas") from error
        trees = [row_to_json(row) for row in self]
        return pandas.DataFrame(
            {field.path: [leaf(tree, field.path) for tree in trees] for field in FIELDS}
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a file, one JSON object per line, as `replay --json` does.

        Args:
            path: the file, which is replaced in one step.

        Raises:
            RowsError: the file cannot be written.

        Example:
            >>> rows.write("rows.jsonl")
        """
        save_jsonl(self, Path(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Rows:
        """Read the rows that `write` or `replay --json` wrote.

        Args:
            path: the file.

        Returns:
            All complete rows of the file.

        Raises:
            RowsError: the file does not exist, or holds something other than rows of this version.

        Warns:
            UserWarning: the last row is incomplete, because its replay was interrupted.

        Example:
            >>> rows = ar.Rows.read("rows.jsonl")
        """
        if not isinstance(path, str | os.PathLike):
            raise RowsError(f"expected the path of a file of rows, got {type(path).__name__}")
        rows, is_cut_off = read_jsonl(Path(path))
        if is_cut_off:
            warnings.warn(f"{path} ends within a row: its replay was interrupted", stacklevel=2)
        return cls(rows)

    def __repr__(self) -> str:
        kernels = len({row.id for row in self if row.kernel})
        calls = len({row.call.name for row in self})
        return f"Rows(rows={len(self)}, kernels={kernels}, calls={calls})"

    def __str__(self) -> str:
        table = [PRINTED, *(_printed(row) for row in self[:MOST_PRINTED])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table if len(table) > 1
        ]
        rest = len(self) - MOST_PRINTED
        return "\n".join([repr(self), *lines, *([f"… and {rest} more"] if rest > 0 else [])])

    def _repr_html_(self) -> str:
        return html_table(HEADINGS, [_line(row) for row in self], [repr(self)])


def _best_of(group: Group, accuracy_class: AccuracyClass) -> Iterator[Row]:
    """Yield a row for each call of a group, from the fastest kernel or the baseline."""
    found = fastest(group, accuracy_class)
    chosen: dict[str, Row] = {}
    is_faster = found and found.speedup and found.speedup.verdict == "fast"
    if found is not None and (is_faster or not group.baseline):
        chosen = {row.call.name: row for row in group.rows[found.kernel]}
    baseline = group.rows.get(KernelId(group.baseline), [])
    fallback = {row.call.name: row for row in baseline if row.is_correct}
    for call in group.calls:
        if row := chosen.get(call.name) or fallback.get(call.name):
            yield row


def rows_of(given: Rowlike) -> Sequence[Row]:
    """Return the given rows, or the rows of the file whose path is given.

    Raises:
        RowsError: the file cannot be read, or the argument is not rows.
    """
    if isinstance(given, str | os.PathLike):
        return Rows.read(given)
    rows = list(given) if isinstance(given, Iterable) else None
    if rows is None or not all(isinstance(row, Row) for row in rows):
        raise RowsError(f"expected rows or the path of a file of them, got {type(given).__name__}")
    return rows


def _printed(row: Row) -> tuple[str, ...]:
    time = "" if row.time_ms is None else f"{row.time_ms.p50:.4g}"
    return tuple(map(printable, (str(row.id), row.call.name, time, _speedup(row), row.status)))


def _speedup(row: Row) -> str:
    if row.is_unconfirmed:
        return UNCONFIRMED
    return speedup_text(row.speedup) if row.speedup else ""


def _line(row: Row) -> tuple[object, ...]:
    errors = None if row.accuracy is None else row.accuracy.reference
    return (
        str(row.id),
        row.call.model,
        place(row.call),
        str(row.call.shape),
        row.time_ms and row.time_ms.p50,
        _speedup(row),
        row.tflops,
        errors and f"{errors.cosine:.6f}",
        errors and f"{errors.relative_l1:.1e}",
        row.status,
        "" if row.is_correct else row.reason,
    )
