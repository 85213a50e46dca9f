"""Makes text from elsewhere safe to show: names from recordings, messages of kernels."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace what a terminal would act on, or cannot show, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
