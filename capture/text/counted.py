"""Formats numbers with their nouns or units."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 call`, `2 calls`, `1,024 elements`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def share(kept: int, seen: int, nbytes: int) -> str:
    """Format the recorded share of a model's calls: `3 of 24 attention calls (1.2 MB)`."""
    return f"{kept:,} of {counted(seen, 'attention call')} ({human_bytes(nbytes)})"


def human_bytes(nbytes: int) -> str:
    """Format a size as `5.2 MB` (decimal units)."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
