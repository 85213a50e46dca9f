"""Makes untrusted text safe to print: names from recordings, messages of kernels, paths."""

from __future__ import annotations

import shlex
from pathlib import Path


def printable(text: str) -> str:
    """Replace control characters and other unprintable characters with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def quoted(path: str | Path) -> str:
    """Quote a path for use in a suggested shell command."""
    return shlex.quote(str(path))
