"""Make text from elsewhere safe to show: kernels' messages, and names from recordings."""

from __future__ import annotations

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell."""


def printable(text: str) -> str:
    """Replace what a terminal would act on, or cannot show, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def no_formula(text: str) -> str:
    """Quote text that a spreadsheet would evaluate, as spreadsheets do: with an apostrophe."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
