"""Outcome of a replay: its rows in order, and the unfinished work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from capture.text.counted import counted

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.rows.row import Machine, Row
    from replay.workers.execution import Assignment
    from replay.workloads.workload import Workload


@dataclass(frozen=True)
class Outcome:
    """Result of a session."""

    rows: list[Row]
    """Rows in the order of the calls, including rows of a resumed file. After an early end, rows of
    incomplete calls are excluded."""
    all_rows: list[Row]
    """All rows in the order of the calls, including those of incomplete calls."""
    is_in_order: bool
    """True if the rows were measured in the order of `all_rows`."""
    left_out: str
    """Description of the work that there was no time for; empty if nothing is missing."""
    why_left_out: str
    """Reason why there was no time, with the time limit; empty without a limit."""


def of_complete_calls(
    rows: Sequence[Row], assigned: Assignment, machines: Sequence[Machine]
) -> list[Row]:
    """Return the rows of calls that have a row of every kernel, or that cannot be read."""
    from replay.bench.resume import label_of

    found: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        found.setdefault(label_of(row, machines), set()).add((row.environment, row.kernel))
    wanted = {(name, kernel.name) for name, kernels in assigned.items() for kernel in kernels}
    complete = {
        call
        for call, present in found.items()
        if wanted <= present or any(not name for _, name in present)
    }
    return [row for row in rows if label_of(row, machines) in complete]


def left_out(
    workloads: Sequence[Workload],
    rows: Sequence[Row],
    machines: Sequence[Machine],
    assigned: Mapping[str, Sequence[Kernel]],
) -> str:
    """Describe the work that there was no time for; return an empty string without any."""
    from replay.bench.resume import label_of

    measured: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        key = label_of(row, machines), row.environment
        measured.setdefault(key, set()).add(row.kernel)
    begun = {label_of(row, machines) for row in rows}
    unreadable = {label_of(row, machines) for row in rows if not row.kernel}
    partly = {
        call
        for call in begun - unreadable
        for name, kernels in assigned.items()
        if {kernel.name for kernel in kernels} - measured.get((call, name), set())
    }
    missing = len(workloads) - len(begun)
    parts = [f"{missing} of {len(workloads)} calls left out"] if missing else []
    parts += [f"{counted(len(partly), 'call')} without some kernels"] if partly else []
    return ", ".join(parts)
