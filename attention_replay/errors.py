"""Base class of every error that is shown to users."""

from __future__ import annotations


def check_type(name: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    """Raise TypeError if an argument is of none of these types."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


LONGEST = 2_000
"""Largest number of characters of a message."""


def shortened(message: str) -> str:
    """Cut the middle of a message that repeats very long text; the remedy at its end stays."""
    if len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST - 500]} … {message[-490:]}"


class Error(Exception):
    """An error that the user can fix; the message is one sentence with the remedy."""

    def __str__(self) -> str:
        return shortened(super().__str__())
