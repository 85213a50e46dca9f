"""Keeps stdout for rows: output of kernels in this process goes to stderr."""

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
    """Yield a stdout for this package alone, while all other output goes to stderr.

    Compiled code bypasses Python's stdout, so the file descriptors are exchanged too. A stdout that
    is not a file, as in a notebook, has no descriptor.
    """
    ours = sys.stdout
    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            stack.callback(keep_open(stream))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            ours.flush()
            kept = os.dup(ours.fileno())
        except (OSError, ValueError):  # a stream without a descriptor raises both at once
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
