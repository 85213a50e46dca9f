"""Reserves stdout for rows, and sends the output of kernels in this process to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from replay.isolation.shared_streams import keep_open

STDOUT, STDERR = 1, 2


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Yield a stdout that only this package uses, while all other output goes to stderr.

    Compiled code bypasses Python's stdout, so the file descriptors are exchanged too, unless stdout
    has no file descriptor, as in a notebook.
    """
    ours = sys.stdout
    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            stack.callback(keep_open(stream))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            ours.flush()
            kept = os.dup(ours.fileno())
        except (OSError, ValueError):  # the stream has no descriptor
            yield ours
            return
        ours = stack.enter_context(
            open(kept, "w", encoding=ours.encoding, errors="backslashreplace", newline="")
        )
        before = os.dup(STDOUT)
        stack.callback(os.close, before)
        stack.callback(os.dup2, before, STDOUT)
        with contextlib.suppress(OSError):  # stderr may be missing
            os.dup2(STDERR, STDOUT)
        yield ours
