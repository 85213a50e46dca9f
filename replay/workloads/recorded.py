"""Workloads made from a recorded dataset."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from capture.errors import DatasetError
from capture.storage.cached_copy import ProgressReport, no_report
from capture.storage.call_file import FileEntry
from capture.storage.dataset import DamagedFile, Dataset
from capture.storage.joined_calls import JoinedCall, is_part
from replay.workloads.call_names import chosen_names
from replay.workloads.sources import DamagedSource, JoinedSource, RecordedSource, resolved
from replay.workloads.workload import Workload


class RecordedWorkloads(NamedTuple):
    """Workloads of a dataset, and a note on how the dataset was read."""

    workloads: list[Workload]
    note: str
    """Remark for the user; usually empty."""


def from_directory(
    where: str | Path,
    patterns: str | None = None,
    *,
    join_ranks: bool = False,
    report: ProgressReport = no_report,
) -> RecordedWorkloads:
    """Return the recorded calls of a dataset.

    A damaged file becomes a workload whose loading raises an error about the damage.

    Args:
        where: a directory, an archive of a directory, or an address (see `capture.load`).
        patterns: comma-separated names and globs of the calls to return.
        join_ranks: join the parts of a call that several ranks recorded into a whole call.
        report: function that is called with the progress of copies from another machine.

    Raises:
        DatasetError: the dataset is missing or cannot be reached, or contains no matching call or
            no call to join.
    """
    dataset = Dataset.open(where, report=report)
    return from_dataset(dataset, patterns, join_ranks=join_ranks, report=report)


def from_dataset(
    dataset: Dataset,
    patterns: str | None = None,
    *,
    join_ranks: bool = False,
    report: ProgressReport = no_report,
) -> RecordedWorkloads:
    """Return the recorded calls of an open dataset, like `from_directory`.

    Remote files are copied to this machine first, because worker processes read them.
    """
    calls, note = _whole_calls(dataset) if join_ranks else _calls_as_recorded(dataset)
    workloads = [*(workload for workload, _ in calls), *map(damaged_file, dataset.damaged)]
    if patterns is not None:
        found = chosen_names([workload.name for workload in workloads], patterns)
        workloads = [workload for workload in workloads if workload.name in found]
    names = {workload.name for workload in workloads}
    wanted = [entry for call, entries in calls if call.name in names for entry in entries]
    # Replace a call by a damaged workload if its file cannot be copied.
    damaged = {file.path: damaged_file(file) for file in dataset.fetch(wanted, report)}
    replaced = {
        call.name: damaged[entry.path]
        for call, entries in calls
        for entry in entries
        if entry.path in damaged
    }
    workloads = [replaced.get(workload.name, workload) for workload in workloads]
    return RecordedWorkloads(workloads, "; ".join(filter(None, (dataset.note, note))))


def recorded_call(entry: FileEntry) -> Workload:
    """Make the workload of a call that `capture` wrote."""
    return Workload.of(RecordedSource(resolved(entry)))


def damaged_file(damaged: DamagedFile) -> Workload:
    """Make the workload of a file that cannot be loaded."""
    return Workload.of(DamagedSource(damaged.path, str(damaged.error)))


_Calls = list[tuple[Workload, tuple[FileEntry, ...]]]


def _calls_as_recorded(dataset: Dataset) -> tuple[_Calls, str]:
    has_parts = any(is_part(entry.origin) for entry in dataset.entries)
    hint = "these calls are parts that ranks share: --join-ranks replays whole calls"
    calls: _Calls = [(recorded_call(entry), (entry,)) for entry in dataset.entries]
    return calls, hint if has_parts else ""


def _whole_calls(dataset: Dataset) -> tuple[_Calls, str]:
    if not any(is_part(entry.origin) for entry in dataset.entries):
        raise DatasetError(
            f"{dataset.address}: every call is whole, none is shared by ranks: leave out "
            "--join-ranks"
        )
    joined = dataset.joined()
    if not joined.calls:
        raise DatasetError(
            f"{dataset.address}: {joined.note}; leave out --join-ranks to replay the parts"
        )
    calls: _Calls = []
    for call in joined.calls:
        source = JoinedSource(JoinedCall(tuple(map(resolved, call.entries))))
        calls.append((Workload.of(source), call.entries))
    return calls, joined.note
