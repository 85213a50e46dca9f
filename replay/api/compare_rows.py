"""Function `compare`, which finds changes in speed and correctness between two runs."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from replay.api.measured_rows import Rowlike, rows_of
from replay.comparison.comparison import Comparison, basis_of, to_json
from replay.comparison.comparison import compare as compare_runs
from replay.comparison.row_matching import ComparisonError, Run, read_run
from replay.comparison.speed_change import Basis
from replay.comparison.spread import read_spread
from replay.report.comparison.comment import to_markdown
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import sections

WIDTH = 100
"""Width of a printed comparison, in columns."""


@dataclass(frozen=True)
class ComparedRuns(Comparison):
    """Comparison of two runs; `print` and notebooks show the changes."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON, as `replay compare --json` writes it."""
        return to_json(self)

    def __str__(self) -> str:
        text = io.StringIO()
        print_comparison(sections(self), Console(file=text, width=WIDTH, highlight=False))
        return text.getvalue().rstrip()

    def _repr_markdown_(self) -> str:
        return to_markdown([self])


def compare(
    before: Rowlike | Run,
    after: Rowlike | Run,
    *,
    of: Basis | None = None,
    spread: str | os.PathLike[str] | float | None = None,
) -> ComparedRuns:
    """Compare two runs: speed and accuracy of the same kernel on the same call.

    Args:
        before: rows of the earlier run, or their file.
        after: rows of the later run, or their file.
        of: `speed-up` or `time`. By default speed-ups over the baseline, which do not change when
            the whole machine drifts, but times if the baseline's own version changed.
        spread: difference between two equal runs: a share such as 0.015 or `1.5%`, or a file with
            the rows of a repetition of `before`.

    Returns:
        A comparison with a verdict for every row; `kernels` has one for each kernel.

    Raises:
        ComparisonError: the runs have nothing in common, or an argument cannot be used.
        RowsError: a file cannot be read.

    Example:
        >>> print(compare("before.jsonl", "after.jsonl", spread="1.5%"))
    """
    if of not in (None, "speed-up", "time"):
        raise ComparisonError(f"invalid basis {of!r}: choose speed-up or time")
    later = run_of(after, "after")
    earlier = run_of(before, "before")
    basis = of or basis_of(earlier, later)
    found = compare_runs(earlier, later, read_spread(_spread(spread), earlier, basis), basis)
    return ComparedRuns(**{field.name: getattr(found, field.name) for field in fields(found)})


def run_of(given: Rowlike | Run, name: str = "rows") -> Run:
    """Return rows, or the rows of a file, as a run.

    Args:
        given: rows, or the path of their file.
        name: name of the run, if its rows do not come from a file.

    Raises:
        ComparisonError: there are no rows.
        RowsError: the file cannot be read, or the argument is not rows.
    """
    if isinstance(given, Run):
        return given
    if isinstance(given, str | os.PathLike):
        return read_run(given)
    rows = rows_of(given)
    if not rows:
        raise ComparisonError(f"{name} holds no rows: replay a call first")
    return Run(name, rows)


def _spread(given: str | os.PathLike[str] | float | None) -> str | None:
    """Format a spread as the string that the command line takes."""
    if given is None or isinstance(given, str):
        return given
    return os.fspath(given) if isinstance(given, os.PathLike) else f"{given * 100:g}%"
