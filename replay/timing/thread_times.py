"""The time that this process's threads ran, and waited for a processor, as Linux counts it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
"""Directory of this process's threads."""


class ThreadTime(NamedTuple):
    """Nanoseconds since a thread's start."""

    ran: int
    """Time on a processor."""
    waited: int
    """Time in which the thread could have run."""


class ThreadTimes:
    """Reader of the threads' times. Without `/proc`, it finds no threads."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._files: dict[int, int] = {}

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def follow(self) -> None:
        """Find the threads of this process."""
        threads = set()
        with contextlib.suppress(OSError):
            threads = set(map(int, os.listdir(self._tasks)))
        for ended in self._files.keys() - threads:
            os.close(self._files.pop(ended))
        for started in threads - self._files.keys():
            with contextlib.suppress(OSError):
                self._files[started] = os.open(
                    self._tasks / str(started) / "schedstat", os.O_RDONLY
                )

    def read(self) -> dict[int, ThreadTime]:
        """Return the times of each thread that existed at the last `follow`."""
        times = {}
        for thread, file in self._files.items():
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                ran, waited, _ = os.pread(file, 100, 0).split()
                times[thread] = ThreadTime(int(ran), int(waited))
        return times


def longest_wait_ns(before: Mapping[int, ThreadTime], after: Mapping[int, ThreadTime]) -> int:
    """Return the longest time that a thread waited between two readings."""
    threads = after.keys() & before.keys()
    return max((after[each].waited - before[each].waited for each in threads), default=0)
