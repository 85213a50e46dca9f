"""Agreement of kernels on the rows that NaN or infinity in hidden inputs may reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from capture.text.counted import counted
from replay.rows.row import Row


def with_agreement(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one call, with a flag where hidden inputs made rows of the output NaN.

    If correct kernels differ in the number of such rows, no kernel of the call is ranked: they do
    not have the same work, because some read the hidden inputs and others skip them.
    """
    sides: dict[int, list[str]] = {}
    for row in rows:
        if row.accuracy is not None and row.is_correct:
            sides.setdefault(row.accuracy.spoilt_rows, []).append(str(row.id))
    if not any(sides):
        return list(rows)
    sentence = ""
    if len(sides) > 1:
        sentence = "; ".join(_side(count, sides[count]) for count in sorted(sides, reverse=True))
    return [row if row.accuracy is None else _flagged(row, sentence) for row in rows]


def _side(count: int, kernels: list[str]) -> str:
    names, is_one = ", ".join(kernels), len(kernels) == 1
    if not count:
        return f"{names} {'does' if is_one else 'do'} not read hidden inputs"
    rows = f"{counted(count, 'row')} from inputs hidden from {'it' if count == 1 else 'them'}"
    return f"{names} {'returns' if is_one else 'return'} NaN in {rows}"


def _flagged(row: Row, sentence: str) -> Row:
    if sentence:
        row = replace(row, speedup=None, not_ranked=sentence)
    if row.accuracy is None or not row.accuracy.spoilt_rows:
        return row
    rows = counted(row.accuracy.spoilt_rows, "output row")
    flag = f"hidden inputs make {rows} NaN or infinite"
    return replace(row, flags=tuple(dict.fromkeys((*row.flags, flag))))
