"""What one check of the self test found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """A check, its verdict, and the numbers behind it."""

    name: str
    passed: bool | None
    """None where the check could not be made."""
    finding: str
    """The numbers in a few words."""
    remedy: str = ""
    """What to do where it failed."""
    figures: Mapping[str, float | int | str | list[str] | list[float]] = field(default_factory=dict)
    """The numbers themselves, by a name that ends with their unit."""
