"""The time limit of a replay. Imports no torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


def in_words(seconds: float) -> str:
    """Format seconds as `40 s`, `6 min` or `2 h 10 min`."""
    if seconds < 99.5:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


class TimeLimit:
    """Time limit of a replay, counted from construction.

    Args:
        seconds: the limit; None for no limit.
        clock: function that returns seconds since any start.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        """Event that a thread of `watched` sets when the time is over."""
        self._clock = clock
        self._began = clock()

    def allows(self, seconds: float) -> bool:
        """Return whether work of this duration would end in time."""
        return self.seconds is None or self._clock() - self._began + seconds <= self.seconds

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Set `stopped` in this block when the time is over."""
        if self.seconds is None:
            yield
            return
        left = max(self.seconds - (self._clock() - self._began), 0.0)
        timer = threading.Timer(left, self.stopped.set)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
