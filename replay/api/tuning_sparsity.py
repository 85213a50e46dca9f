"""Sparse attention of a tuning: recorded calls are examined once, for candidates of the plans."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.text.counted import counted
from replay.api.chosen_device import device_of
from replay.api.messages import say

if TYPE_CHECKING:
    from torch import nn

    from capture.storage.call_file import FileEntry
    from replay.distribution.time_limit import TimeLimit
    from replay.rows.row import Row
    from replay.sparsity.candidates import SparseCandidates
    from replay.sparsity.examined_calls import Examination
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.directory import TuningDirectory

MOST_CALLS = 60
"""Largest number of calls of denoising steps that are recorded and examined. Each layer has one at
least."""


def check_device(kernel: SparseKernel, roots: Mapping[str, nn.Module]) -> None:
    """Raise Error if a sparse kernel cannot run where a model runs."""
    import torch

    weights = (each for root in roots.values() for each in root.parameters())
    device = next((each.device for each in weights if each.device.type != "meta"), None)
    # An offloaded model appears to be on the CPU.
    if device is None or (device.type == "cpu" and torch.cuda.is_available()):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := kernel.unavailable(device)) is not None:
        raise Error(f"sparse attention cannot run here ({kernel.name} {reason}): tune without it")


def sparse_candidates(
    kernel: SparseKernel,
    files: TuningDirectory,
    entries: Sequence[FileEntry],
    rows: Sequence[Row],
    device: str | None,
    limit: TimeLimit,
    *,
    quiet: bool,
) -> tuple[SparseCandidates, str]:
    """Return block-sparse candidates for the cells of a plan, from the recorded calls.

    Calls that the directory holds an examination of are not examined again.

    Args:
        entries: the recorded calls.
        rows: rows of these calls, which name the kernel that the model itself ran.
        device: device to examine calls on; None for a GPU if present.
        limit: time limit of the examination.
        quiet: True to hide progress and the reasons why layers have no candidates.

    Returns:
        The candidates, and a description of the calls that there was no time to examine.
    """
    from replay.end_to_end.model_process import OWN
    from replay.end_to_end.run_pace import RunPace
    from replay.plan.call_matching import RowsByCall
    from replay.report.progress import shown_runs
    from replay.sparsity.candidates import SparseCandidates
    from replay.sparsity.examined_calls import Examination, examine
    from replay.sparsity.settings import SETTINGS
    from replay.workloads.sources import RecordedSource
    from replay.workloads.workload import Workload

    by_call = RowsByCall(rows, OWN)
    own = {facts.name: by_call.own(facts.name) for facts in by_call.timed()}
    found = Examination()
    with contextlib.suppress(FileNotFoundError):
        found = Examination.load(files.sparsity)
    workloads = [Workload.of(RecordedSource(entry)) for entry in entries]
    progress = RunPace()
    if not quiet and not all(map(found.has, own)):
        say(f"examining {counted(len(own), 'call')} for sparse attention")
    with shown_runs(progress, "examining sparse attention", quiet=quiet):
        examine(workloads, kernel, SETTINGS, own, device_of(device), progress, limit, found)
    with files.writing():
        found.save(files.sparsity)
    late = [name for name in own if not found.has(name)]
    unexamined = (
        f"{len(late)} of {len(own)} calls not examined for sparse attention" if late else ""
    )
    if unexamined and not quiet:
        say(unexamined)
    if found.left_out and not quiet:
        say(_left_out(found, entries))
    return SparseCandidates(kernel.name, SETTINGS, found.calls), unexamined


def _left_out(found: Examination, entries: Sequence[FileEntry]) -> str:
    """Return a sentence about the layers without sparse attention, and the reasons."""
    layers = {
        (entry.origin.module, reason)
        for entry in entries
        if (reason := found.left_out.get(entry.path.stem)) is not None
    }
    parts = [
        f"{counted(number, 'layer')} ({reason})"
        for reason, number in Counter(reason for _, reason in layers).most_common()
    ]
    return f"no sparse attention at {', '.join(parts)}"
