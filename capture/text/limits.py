"""Checks integer arguments that are limits or indices. Does not import torch."""

from __future__ import annotations

import operator
from typing import Any


def positive(name: str, given: Any) -> int:
    """Check that the argument `name` is an integer of at least 1, and return it as an `int`."""
    return _integer(name, given, 1)


def natural(name: str, given: Any) -> int:
    """Check that the argument `name` is an integer of at least 0, and return it as an `int`."""
    return _integer(name, given, 0)


def must_be_integer(least: int, given: str) -> str:
    """Return the message for an invalid integer: the valid range and the given value."""
    return f"must be an integer of at least {least}, not {given}"


def _integer(name: str, given: Any, least: int) -> int:
    try:
        # `int` would convert 2.5 to 2; `index` accepts only integers, including NumPy's.
        value = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name} {must_be_integer(least, repr(given))}")
    return value
