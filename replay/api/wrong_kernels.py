"""Sentences of the doctor on kernels that became wrong between two runs."""

from __future__ import annotations

import os

from attention_replay.errors import Error
from replay.api.diagnose import examine_recording
from replay.comparison.comparison import Comparison, Pair
from replay.rows.row import HERE, KernelId

MOST_KERNELS = 3
"""Maximum number of kernels to examine, because each takes seconds to minutes."""


def examined(comparison: Comparison, recording: str | os.PathLike[str]) -> dict[KernelId, str]:
    """Examine kernels that became wrong, each on its first wrong call, and return a sentence each.

    Kernels of other Python environments are left out.

    Args:
        comparison: runs of the calls of this recording.
        recording: directory, archive or address of the recording.
    """
    wrong: dict[KernelId, Pair] = {}
    for pair in comparison.pairs:
        if pair.became_wrong and pair.after.environment == HERE:
            wrong.setdefault(pair.after.id, pair)
    some = list(wrong.items())[:MOST_KERNELS]
    return {kernel: _sentence(pair, recording) for kernel, pair in some}


def _sentence(pair: Pair, recording: str | os.PathLike[str]) -> str:
    row = pair.after
    try:
        found = examine_recording(
            recording,
            [row.kernel],
            calls=[row.call.name],
            device=None if row.machine.cuda else "cpu",
            progress=False,
        )
    except Error as error:
        return f"the doctor could not examine it: {error}"
    if not found.wrong:
        return f"the doctor found it right on {row.call.name}"
    first = found.wrong[0]
    return f"{first.cause} on {first.call} ({first.place}): {first.sentence}"
