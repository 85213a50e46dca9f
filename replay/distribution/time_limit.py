"""The time at which a replay has to end. Imports no torch."""

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
    """The time that a replay may take, from now on.

    Args:
        seconds: None for no limit.
        clock: returns seconds, from any start.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        """Set by a thread of `watched` when the time is over."""
        self._clock = clock
        self._began = clock()

    def allows(self, seconds: float) -> bool:
        """Return whether work that takes this long would end in time."""
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
