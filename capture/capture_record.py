"""What the manifest says of one capture of one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CaptureRecord:
    """One capture of one model, as the manifest describes it."""

    model: str
    weights: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What is needed to rebuild the run: size, checkpoint, prompt, steps, seed, dtype, device …"""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    """UTC, ISO 8601."""
    complete: bool = False
    """False during the run, and afterwards if it was interrupted or failed."""
    sample: str = ""
    modules: str = ""
    """Glob of the module paths whose calls could be stored."""
    calls_seen: int = 0
    census: dict[str, Any] = field(default_factory=dict)
    """Counts of all calls, stored or not: see `capture.census`. Empty after a rebuild."""
