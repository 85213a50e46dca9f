"""What to replay, from what `Workload.source` says of it in JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from capture.call_file import FileEntry
from replay.workloads.random_calls import Spec, dtype, twin, workload
from replay.workloads.recorded import Workload, pickled_call, recorded_call


def workload_of(source: dict[str, Any]) -> Workload:
    """The call that a source names.

    Raises:
        DatasetError: its file cannot be read.
    """
    if source["kind"] == "recorded":
        path = Path(source["path"])
        entry = FileEntry.read(path)
        return recorded_call(replace(entry, nbytes=source["nbytes"], checksum=source["checksum"]))
    if source["kind"] == "pickled":
        return pickled_call(Path(source["path"]))
    if source["kind"] == "twin":
        return twin(workload_of(source["of"]), source["seed"])
    spec = Spec(**{**source["spec"], "dtype": dtype(source["spec"]["dtype"])})
    return workload(source["name"], source["model"], spec, source["seed"])
