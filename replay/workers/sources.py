"""What to replay, from what `Workload.source` says of it in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.dataset import DamagedFile
from capture.storage.joined_calls import JoinedCall
from replay.workloads.random_calls import Spec, dtype, workload
from replay.workloads.recorded import (
    Workload,
    damaged_file,
    joined_call,
    pickled_call,
    recorded_call,
)
from replay.workloads.synthetic_counterparts import twin


def workload_of(source: dict[str, Any]) -> Workload:
    """The call that a source names, not read yet."""
    if source["kind"] == "recorded":
        return recorded_call(FileEntry.from_json(Path(source["directory"]), source["entry"]))
    if source["kind"] == "joined":
        directory = Path(source["directory"])
        entries = [FileEntry.from_json(directory, entry) for entry in source["entries"]]
        return joined_call(JoinedCall(tuple(entries)))
    if source["kind"] == "damaged":
        error = DatasetError(source["reason"])
        return damaged_file(DamagedFile(Path(source["path"]), error))
    if source["kind"] == "pickled":
        return pickled_call(Path(source["path"]))
    if source["kind"] == "twin":
        return twin(workload_of(source["of"]), source["values"], source["seed"])
    spec = Spec(**{**source["spec"], "dtype": dtype(source["spec"]["dtype"])})
    return workload(source["name"], source["model"], spec, source["seed"])
