"""Matrix of kernels and kinds of call, the one result that all reports show."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from replay.report.groups import Group, group_rows, names_by_sentence
from replay.report.pooled import pooled_speedup
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import (
    INTERRUPTED_BLOCKS,
    UNCONFIRMED,
    KernelId,
    Row,
    SpeedReason,
    Speedup,
    Status,
)

Outcome = Literal["baseline", "faster", "same", "slower", "wrong", "inconclusive", "cannot"]
MARKS: dict[Outcome, tuple[str, str]] = {
    "same": ("=", "same speed"),
    "wrong": ("✗", "wrong or failed"),
    "inconclusive": ("?", "inconclusive"),
    "cannot": ("–", "cannot run"),
}
"""Mark and meaning of the outcomes that show no speed-up."""

DECIDED: tuple[Outcome, ...] = ("faster", "same", "slower")
"""Outcomes of kernels that were compared with the baseline."""

UNEXPLAINED: tuple[Outcome, ...] = ("wrong", "cannot", "inconclusive")
"""Outcomes that need a reason, the most urgent first."""

FAULTS: tuple[Status, ...] = ("error", "crash", "timeout")
"""Status of rows whose kernel should have run the call and failed."""

BUSY = "busy machine"
REASONS: dict[SpeedReason, str] = {
    "interrupted": BUSY,
    "too-few-rounds": "too few rounds",
    "noisy": "interval too wide",
    "interval-includes-1": "interval too wide",
}
"""Reasons of inconclusive speed-ups, in words."""


@dataclass(frozen=True)
class Cell:
    """Result of one kernel on one kind of call."""

    outcome: Outcome
    speedup: Speedup | None = None
    """Speed-up over the kind's baseline; None if the kernel was not compared with it."""
    reason: str = ""
    """Reason of `wrong`, `cannot` and `inconclusive`."""

    @property
    def text(self) -> str:
        """Text of a cell in a table: a speed-up, a mark or `baseline`."""
        if self.outcome in MARKS:
            return MARKS[self.outcome][0]
        return f"{self.speedup.ratio:.2f}×" if self.speedup else self.outcome


@dataclass(frozen=True)
class Matrix:
    """Cells of all kernels in all kinds of call."""

    kinds: list[Group]
    kernels: list[KernelId]
    """Fastest correct kernels first, then wrong ones, then kernels that ran no call."""
    cells: dict[tuple[KernelId, int], Cell]
    """Cells by kernel and index of the kind."""

    def row(self, kernel: KernelId) -> list[Cell]:
        """Return a kernel's cells, one for each kind of call."""
        return [self.cells[kernel, at] for at in range(len(self.kinds))]

    def class_of(self, kernel: KernelId) -> AccuracyClass:
        """Return a kernel's accuracy class, which is `exact` if its rows do not specify one."""
        rows = (row for kind in self.kinds for row in kind.rows.get(kernel, ()))
        return next((row.accuracy_class for row in rows if row.accuracy_class), "exact")

    def label(self, kernel: KernelId) -> str:
        """Return a kernel's name, with its accuracy class unless that is `exact`."""
        accuracy_class = self.class_of(kernel)
        return str(kernel) if accuracy_class == "exact" else f"{kernel} ({accuracy_class})"

    @property
    def tried(self) -> list[KernelId]:
        """Kernels that can run a kind of call, or should and failed."""
        return [
            kernel
            for kernel in self.kernels
            if any(cell.outcome != "cannot" for cell in self.row(kernel))
        ]

    def reasons(
        self, kernels: Sequence[KernelId], columns: Sequence[str] = ()
    ) -> Iterator[tuple[Outcome, str, str]]:
        """Yield outcome, names and reason.

        Figures in a reason may differ from call to call. Errors differ between kernels too, so a
        wrong kernel has a reason of its own.

        Args:
            columns: names of the kinds of call. The columns of a reason follow the kernel's name,
                as in `fa2 in A, C`, unless they are all.
        """
        for outcome in UNEXPLAINED:
            first: dict[tuple[object, str], str] = {}
            places: dict[str, dict[KernelId, list[int]]] = {}
            for kernel in kernels:
                alike = kernel if outcome == "wrong" else None
                for at, cell in enumerate(self.row(kernel)):
                    if cell.outcome == outcome and cell.reason:
                        words = re.sub(r"[\d.,]+", "", cell.reason)
                        reason = first.setdefault((alike, words), cell.reason)
                        places.setdefault(reason, {}).setdefault(kernel, []).append(at)
            for reason, found in places.items():
                pairs = ((str(kernel), _in(columns, own)) for kernel, own in found.items())
                names = (f"{own}{where}" for where, own in names_by_sentence(pairs).items())
                yield outcome, "; ".join(names), reason

    def is_unavailable(self, kernel: KernelId) -> bool:
        """Return True if no call ran a kernel because this machine lacks what it needs."""
        rows = (row for kind in self.kinds for row in kind.rows.get(kernel, ()))
        return all(row.status == "unavailable" for row in rows)


def _in(columns: Sequence[str], own: Sequence[int]) -> str:
    """Return where a reason holds; empty if everywhere, or if columns have no names."""
    if len(columns) in (0, len(own)):
        return ""
    return f" in {', '.join(columns[at] for at in own)}"


def matrix(rows: Sequence[Row]) -> Matrix:
    """Summarise the rows of a replay; rows of unreadable calls are left out."""
    kinds = group_rows(rows)
    kernels = list(dict.fromkeys(kernel for kind in kinds for kernel in kind.rows))
    cells = {
        (kernel, at): _cell(kind, kernel) for kernel in kernels for at, kind in enumerate(kinds)
    }
    found = Matrix(kinds, kernels, cells)
    kernels.sort(key=lambda kernel: _order(found.row(kernel)))
    return found


def _cell(kind: Group, kernel: KernelId) -> Cell:
    rows = kind.rows.get(kernel)
    if not rows:
        return Cell("cannot", reason="it was not replayed")
    for row in rows:
        if row.status == "inaccurate":
            return Cell("wrong", reason=row.reason)
        if row.overwrites:
            names = ", ".join(row.overwrites)
            return Cell("wrong", reason=f"changes its {names}, which later calls read again")
    for row in rows:
        if row.status in FAULTS:
            return Cell("wrong", reason=f"{row.status}: {row.reason}")
    for row in rows:
        if not row.is_correct:
            return Cell("cannot", reason=f"{row.status}: {row.reason}")
    if kernel.name == kind.baseline:
        return Cell("baseline")
    for row in rows:
        if not row.is_comparable:
            flags = (flag for flag in row.flags if flag.startswith(UNCONFIRMED))
            reason = row.not_ranked or next(flags)
            return Cell("inconclusive", reason=BUSY if reason == INTERRUPTED_BLOCKS else reason)
    speedup = pooled_speedup(kind, kernel)
    if speedup is None:
        # The reason of other correct rows describes their errors.
        untimed = next((row.reason for row in rows if row.status == "not-timed"), "")
        return Cell("inconclusive", reason=untimed or "it shares no rounds with a baseline")
    if speedup.differs:
        return Cell("faster" if speedup.verdict == "fast" else "slower", speedup)
    if speedup.verdict == "same":
        return Cell("same", speedup)
    return Cell("inconclusive", speedup, REASONS[speedup.reason])


def _order(cells: Sequence[Cell]) -> tuple[int, float]:
    """Return a sort key: correct, wrong or unable; then the geometric mean of the speed-ups."""
    outcomes = {cell.outcome for cell in cells}
    place = 2 if outcomes == {"cannot"} else 1 if "wrong" in outcomes else 0
    ratios = [cell.speedup.ratio for cell in cells if cell.speedup and cell.outcome in DECIDED]
    if not ratios:
        return place, -1.0 if "baseline" in outcomes else 0.0
    return place, -statistics.geometric_mean(ratios)
