"""Makes stdin, stdout and stderr usable, whatever a command was started with."""

from __future__ import annotations

import codecs
import io
import os
import sys

PLAIN = str.maketrans("×·µ…–−²√→", "x-u.--2v>")
"""What is printed for a character that the encoding lacks: as wide, so that tables stay aligned."""


def make_usable() -> None:
    """Open streams that are closed, and let none fail at a character that its encoding lacks.

    Where a stream is closed, as a service's may be, the next file or pipe takes its number, and
    what is printed ends up there. A terminal or a variable (`PYTHONIOENCODING`) may want ASCII.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            opened = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, opened)
    codecs.register_error("attention-replay", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="attention-replay")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(PLAIN)
    return lacking.encode("ascii", "replace").decode("ascii"), error.end
