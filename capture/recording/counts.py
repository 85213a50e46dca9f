"""Counts about a recording in progress, other than the numbers of calls seen and kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RecordingCounts:
    """Counts of calls that are not in the census, or are lost, and the cost of recording."""

    nbytes: int = 0
    """Size of the tensors of the kept calls."""
    without_gradients: int = 0
    """Number of kept calls whose gradients did not come; 0 unless gradients are recorded."""
    lost: int = 0
    """Number of calls that were chosen but could not be stored."""
    traced: int = 0
    """Number of calls that a tracer made, such as `torch.jit.trace`; the census lacks them."""
    refused_for_bytes: int = 0
    """Number of calls that were not kept because of `max_bytes`."""
    waited_seconds: float = 0.0
    """Time that the model waited for host memory, or for room on its GPU."""
    flush_seconds: float = 0.0
    """Time from the model's return until everything was on the disk."""
    written_bytes: int = 0
    """Size of all files written, including files deleted later in favour of better calls."""
