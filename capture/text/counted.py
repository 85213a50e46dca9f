"""Numbers with their nouns, as people write them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 call`, `2 calls`, `1,024 elements`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
