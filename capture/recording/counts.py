"""Counts about a recording in progress, other than the numbers of calls seen and kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RecordingCounts:
    """Counts of calls that are not stored, and of the time and memory that recording took."""

    nbytes: int = 0
    """Size of the tensors of the kept calls."""
    lost: int = 0
    """Number of calls that were chosen but could not be stored."""
    without_values: int = 0
    """Number of calls with no values to store: their tensors were meta, fake or nested, or the call
    was being traced."""
    without_heads: int = 0
    """Number of calls that cannot be reduced to the selected heads."""
    refused_for_bytes: int = 0
    """Number of calls that were not kept because of `max_bytes`."""
    waited_seconds: float = 0.0
    """Time that the model waited because the buffer of unwritten calls was full."""
    allocation_seconds: float = 0.0
    """Time that allocating and pinning host memory took, during the model's run."""
    flush_seconds: float = 0.0
    """Time from the model's return until everything was on the disk."""
    written_bytes: int = 0
    """Size of all files written, including files deleted later in favour of better calls."""
