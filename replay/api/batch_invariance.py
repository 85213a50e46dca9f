"""Function `agree`, which tests whether outputs of a sequence depend on the rest of the batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from replay.api.choices import joined_names
from replay.api.chosen_device import ChoiceError, device_of
from replay.api.diagnose import able_kernels, one_by_one
from replay.api.replay_calls import call_choice

if TYPE_CHECKING:
    import torch

    from capture.call.attention_call import AttentionCall
    from capture.storage.dataset import Dataset
    from replay.diagnosis.agreements import Agreements

CHUNK = 64
"""Default number of queries in a chunk."""


def agree(
    dataset: str | os.PathLike[str] | Dataset | Iterable[AttentionCall],
    kernels: str | Sequence[str] | None = None,
    *,
    calls: str | Sequence[str] | None = None,
    chunk: int = CHUNK,
    device: str | torch.device | None = None,
    workers: bool = True,
    timeout: float = 300.0,
    progress: bool | None = None,
) -> Agreements:
    """Test kernels for batch invariance: compare outputs of the same sequence bit by bit.

    The cases are `repeated` (the recorded call twice), `alone` (sequences without the rest of the
    batch), `company` (in the reversed batch with other values, or in batches of 2 and 8) and
    `chunked` (queries in chunks, causal ones with a growing cache).

    Args:
        dataset: a directory that `capture` wrote, an archive of one, an address, a dataset, or
            calls.
        kernels: names and globs, as a list or comma-separated; by default those of a plain replay.
        calls: names and globs of the calls to use; by default all.
        chunk: number of queries in a chunk.
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        workers: False to run kernels in this process.
        timeout: seconds after which a kernel's process without a sign of life is killed.
        progress: False to hide progress on stderr.

    Returns:
        `Agreements`: print them, or read `found`, which has the verdicts of each kernel and call.

    Raises:
        ChoiceError: a named kernel cannot run here, no kernel can, or `chunk` is not positive.
        DatasetError: the recording cannot be read.

    Example:
        >>> print(agree("captured_inputs", "torch-*"))
    """
    from replay.bench.settings import Settings
    from replay.diagnosis.agreements import agreements
    from replay.distribution.pace import Pace
    from replay.report.progress import shown_progress

    if chunk < 1:
        raise ChoiceError(f"chunk must be at least 1, got {chunk}")
    quiet = progress is False
    place = device_of(None if device is None else str(device))
    with call_choice(dataset, joined_names(calls)) as choice:
        chosen = choice.found(choice.opened(quiet=quiet), quiet=quiet)
        able = able_kernels(joined_names(kernels), place, timeout, workers=workers)
        tasks = [f"{call.name}, {kernel.name}" for call in chosen.workloads for kernel in able]
        with shown_progress(Pace(dict.fromkeys(tasks, 1.0)), quiet=quiet) as report:
            found = agreements(
                chosen.workloads,
                able,
                Settings(place, "warm"),
                timeout if workers else None,
                one_by_one(report, tasks),
                chunk=chunk,
            )
    found.note = chosen.note
    return found
