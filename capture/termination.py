"""Lets a recording write what is in memory before SIGTERM ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def before_termination(flush: Callable[[], bool]) -> Iterator[None]:
    """Call `flush` when SIGTERM arrives, then end the process as the signal would have.

    Does nothing outside the main thread, or if the program handles the signal itself.

    Args:
        flush: returns False if somebody else is already flushing; then the process ends with the
            `with` block.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    arrived = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if flush():
            _terminate()
        arrived = True

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if arrived:
            _terminate()


def _terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
