"""The time limit of a replay. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

LOOK_SECONDS = 0.1
"""Interval between checks of whether a replay whose time is over may be stopped."""


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

    @property
    def elapsed(self) -> float:
        """Return the seconds since construction."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Return the seconds until the limit, or 0 after it; infinity without a limit."""
        return math.inf if self.seconds is None else max(self.seconds - self.elapsed, 0.0)

    def allows(self, seconds: float) -> bool:
        """Return whether work of this duration would end in time."""
        return self.seconds is None or self.elapsed + seconds <= self.seconds

    @contextlib.contextmanager
    def watched(self, may_stop: Callable[[], object]) -> Iterator[None]:
        """Set `stopped` in this block when the time is over and `may_stop` returns a true value."""
        ended = threading.Event()

        def watch(limit: float) -> None:
            left = limit - self.elapsed
            while not ended.wait(max(left, 0.0)):
                if may_stop():
                    self.stopped.set()
                    return
                left = LOOK_SECONDS

        if self.seconds is not None:
            threading.Thread(target=watch, args=[self.seconds], daemon=True).start()
        try:
            yield
        finally:
            ended.set()
