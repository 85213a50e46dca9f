"""Result of one check of the self-test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """Name and verdict of a check, with the underlying numbers."""

    name: str
    passed: bool | None
    """True if the check passed; None if the check could not run."""
    finding: str
    """Short text with the measured numbers."""
    remedy: str = ""
    """Advice for a failed check."""
    figures: Mapping[str, float | int | str | list[str] | list[float]] = field(default_factory=dict)
    """Numbers by name; each name ends with the unit."""
