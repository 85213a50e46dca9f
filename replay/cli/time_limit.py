"""`--max-time`: when a replay has to end. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator

from capture.command_line.parser import not_empty

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def duration(given: str) -> float:
    """Parse `10m`, `90s`, `1h30m` or a number of seconds, for `add_argument(type=…)`."""
    not_empty(given)
    parts = re.fullmatch(r"(?=.)(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s?)?", given)
    if parts is None:
        raise argparse.ArgumentTypeError(f"must be a time like 10m, 90s or 1h30m, not {given!r}")
    seconds = sum(
        int(part) * unit for part, unit in zip(parts.groups("0"), UNITS.values(), strict=True)
    )
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be longer than nothing, not {given!r}")
    return seconds


def in_words(seconds: float) -> str:
    """`40 s`, `6 min`, `2 h 10 min`."""
    if seconds < 99.5:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


class TimeLimit:
    """The time that a command may take, from now on.

    Args:
        seconds: None for any.
        clock: seconds, from any start.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        """Set when the time is over, by a thread of `watched`."""
        self._clock = clock
        self._began = clock()

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
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
