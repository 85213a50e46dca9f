"""Lets SIGTERM end a command as Ctrl-C does, so that what it has so far is kept and shown."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the block when SIGTERM arrives, unless SIGTERM is ignored.

    Later signals are ignored while the command finishes: `timeout` sends two, one to the process
    and one to its group.

    Yields:
        A list, to which SIGTERM is added when it arrives.
    """
    arrived: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if not arrived:
            arrived.append(number)
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, before)
