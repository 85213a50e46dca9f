"""The quoting of text that spreadsheets would evaluate."""

from __future__ import annotations

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell."""


def no_formula(text: str) -> str:
    """Quote text that a spreadsheet would evaluate, with an apostrophe as in spreadsheets."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
