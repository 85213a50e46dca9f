"""Whole numbers that bound or name something, as both commands and `record` check them.

Imports no torch.
"""

from __future__ import annotations

import operator
from typing import Any


def positive(name: str, given: Any) -> int:
    """Return the argument `name` as an integer of at least 1.

    Raises:
        ValueError: it is something else.
    """
    return _integer(name, given, 1)


def natural(name: str, given: Any) -> int:
    """Return the argument `name` as an integer of at least 0.

    Raises:
        ValueError: it is something else.
    """
    return _integer(name, given, 0)


def must_be_integer(least: int, given: str) -> str:
    """Say what an integer has to be, and what was given instead."""
    return f"must be an integer of at least {least}, not {given}"


def _integer(name: str, given: Any, least: int) -> int:
    try:
        # Not `int`, which takes 2.5 for 2; but NumPy's integers.
        value = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} {must_be_integer(least, repr(given))}")
    return value
