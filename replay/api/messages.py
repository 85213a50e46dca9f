"""Sentences for the user on stderr, preceded by the command's name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from capture.text.printable import printable

_command = "replay"


def say(sentence: str) -> None:
    """Print a sentence on stderr, preceded by the name of the command that runs."""
    print(f"{_command}: {printable(sentence)}", file=sys.stderr)


@contextlib.contextmanager
def speaking_as(command: str) -> Iterator[None]:
    """Let sentences begin with the name of this command, e.g. `replay plan`."""
    global _command
    before, _command = _command, command
    try:
        yield
    finally:
        _command = before
