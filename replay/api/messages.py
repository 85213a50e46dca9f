"""Sentences for the user, printed on stderr after the command's name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from capture.text.printable import printable

_command = "replay"


def say(sentence: str) -> None:
    """Print a sentence on stderr after the name of the running command."""
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


@contextlib.contextmanager
def shown_steps(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step on a terminal; yield the function that sets this step."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with Console(stderr=True, quiet=quiet or not console.is_terminal).status("") as status:
        yield lambda step: status.update(Text(printable(step)))
