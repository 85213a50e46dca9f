"""Checks of whole numbers that limit or number something. Imports no torch."""

from __future__ import annotations

import operator
from typing import Any


def positive(name: str, given: Any) -> int:
    """Return the argument `name` as an integer of at least 1."""
    return _integer(name, given, 1)


def natural(name: str, given: Any) -> int:
    """Return the argument `name` as an integer of at least 0."""
    return _integer(name, given, 0)


def must_be_integer(least: int, given: str) -> str:
    """Say which integers are valid, and what was given instead."""
    return f"must be an integer of at least {least}, not {given}"


def _integer(name: str, given: Any, least: int) -> int:
    try:
        # `int` would take 2.5 for 2; `index` only takes integers, including NumPy's.
        value = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} {must_be_integer(least, repr(given))}")
    return value
