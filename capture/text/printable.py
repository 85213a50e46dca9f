"""Makes text from elsewhere safe to show: names from recordings, messages of kernels, paths."""

from __future__ import annotations

import shlex
from pathlib import Path


def printable(text: str) -> str:
    """Replace what a terminal would act on, or cannot show, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def quoted(path: str | Path) -> str:
    """A path as a shell takes it, in a command that is suggested."""
    return shlex.quote(str(path))
