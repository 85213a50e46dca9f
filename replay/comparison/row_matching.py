"""Pairs of rows, from two runs, of the same kernel on the same call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from attention_replay.errors import Error
from replay.rows.row import CallFacts, KernelId, Row
from replay.rows.row_files import read_jsonl


class ComparisonError(Error):
    """Reason why two runs cannot be compared; the message gives the remedy."""


@dataclass(frozen=True)
class Run:
    """Rows of one replay."""

    name: str
    """Name of the file, or a description of the rows."""
    rows: Sequence[Row]
    is_cut_off: bool = False
    """True if the run was interrupted while a row was being written."""

    @property
    def unreadable(self) -> list[str]:
        """Names of the calls that could not be replayed."""
        return [row.call.name for row in self.rows if not row.kernel]

    @property
    def devices(self) -> list[str]:
        """Names of the devices, without duplicates."""
        return sorted({row.machine.device for row in self.rows} - {""})

    @property
    def commit(self) -> str:
        """Commits of the rows, joined by `and`; a resumed run may have several."""
        return " and ".join(dict.fromkeys(row.commit for row in self.rows if row.commit))

    @property
    def measured_at(self) -> str:
        """Beginning of the run in UTC (ISO 8601); empty if the rows have no date."""
        return min((row.measured_at for row in self.rows if row.measured_at), default="")


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the rows of a file as a run.

    Raises:
        ComparisonError: the file has no rows.
        RowsError: the file cannot be read.
    """
    name = os.fspath(path)
    stored = read_jsonl(Path(path))
    if not stored.rows:
        raise ComparisonError(f"{name} holds no rows: write it with `replay --json`")
    return Run(name, stored.rows, stored.is_cut_off)


class Matched(NamedTuple):
    """Matched and unmatched rows of two runs, in the order of the runs."""

    pairs: list[tuple[Row, Row]]
    missing: list[Row]
    """Rows that only the earlier run has."""
    new: list[Row]
    """Rows that only the later run has."""


class Difference(NamedTuple):
    """Property of a machine or its software that differs between two runs."""

    environment: str
    field: str
    before: str
    after: str


def match(before: Run, after: Run) -> Matched:
    """Match rows of the same kernel and environment on the same call.

    Two calls are the same if they are equal except for the recorded backend, which may differ
    between versions of PyTorch.

    Raises:
        ComparisonError: a run has two rows of a kernel on a call, or the runs share no such pair.
    """
    old, new = _by_subject(before), _by_subject(after)
    common = [subject for subject in old if subject in new]
    if not common:
        raise ComparisonError(
            f"{before.name} and {after.name} have no kernel on the same call in common: replay the "
            "same dataset with the same kernels"
        )
    return Matched(
        [(old[subject], new[subject]) for subject in common],
        [row for subject, row in old.items() if subject not in new],
        [row for subject, row in new.items() if subject not in old],
    )


def _by_subject(run: Run) -> dict[tuple[KernelId, CallFacts], Row]:
    found: dict[tuple[KernelId, CallFacts], Row] = {}
    for row in run.rows:
        if not row.kernel:
            continue
        subject = (row.id, replace(row.call, backend="", nonfinite=""))  # absent from earlier files
        if subject in found:
            raise ComparisonError(
                f"{run.name} has two rows of {row.id} on {row.call.name}: give each run a file of "
                "its own"
            )
        found[subject] = row
    return found


def differences(pairs: Iterable[tuple[Row, Row]]) -> list[Difference]:
    """List the differences between the machines and software versions of paired rows."""
    found: dict[Difference, None] = {}
    for before, after in pairs:
        if not (before.machine.device and after.machine.device):
            continue  # the worker died before it described its machine
        old, new = asdict(before.machine), asdict(after.machine)
        for field, value in old.items():
            if value != new[field]:
                found[Difference(before.environment, field, str(value), str(new[field]))] = None
    return list(found)


def check_settings(pairs: Iterable[tuple[Row, Row]], before: Run, after: Run) -> None:
    """Check that both runs were timed in the same way.

    Raises:
        ComparisonError: the runs' settings differ, so their times are not comparable.
    """
    for old, new in pairs:
        if old.time_ms is None or new.time_ms is None:
            continue
        for option, one, other in (
            ("--cache", old.cache, new.cache),
            ("--calls-before", old.calls_before, new.calls_before),
        ):
            if one != other:
                raise ComparisonError(
                    f"{before.name} was measured with {option} {one} and {after.name} with "
                    f"{option} {other}: replay one of them again"
                )
        if old.timer != new.timer:
            raise ComparisonError(
                f"{before.name} was timed by {old.timer} and {after.name} by {new.timer}: replay "
                "the earlier one again"
            )
