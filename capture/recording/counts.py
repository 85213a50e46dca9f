"""Figures about a recording in progress, beside the calls that it has seen and kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RecordingCounts:
    """Counts of calls that are not stored, and of the time and memory that recording took."""

    nbytes: int = 0
    """Size of the tensors of the kept calls."""
    lost: int = 0
    """Calls that were chosen and could not be stored."""
    without_values: int = 0
    """Calls that cannot be stored: meta, fake or nested tensors, inside `vmap` or a trace."""
    without_heads: int = 0
    """Calls that cannot be stored because no call has just the wanted heads."""
    refused_for_bytes: int = 0
    """Calls that were not kept because of `max_bytes`."""
    waited_seconds: float = 0.0
    """Time that the model waited because `buffer_bytes` of calls were still to be written."""
    allocation_seconds: float = 0.0
    """Time that allocating and pinning host memory took, during the model's run."""
    flush_seconds: float = 0.0
    """Time from the model's return until everything was on the disk."""
    written_bytes: int = 0
    """Size of all files written, including those deleted since for better ones."""
