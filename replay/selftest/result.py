"""Result of one check of the self-test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """Name and verdict of a check, and the numbers behind it."""

    name: str
    passed: bool | None
    """None if the check could not be made."""
    finding: str
    """Numbers in a few words."""
    remedy: str = ""
    """Advice for a failed check."""
    figures: Mapping[str, float | int | str | list[str] | list[float]] = field(default_factory=dict)
    """Numbers by a name that ends with their unit."""
