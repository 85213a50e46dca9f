"""The time that this process's threads ran, and waited for a processor, as Linux counts it."""

from __future__ import annotations

import contextlib
import os
import threading
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
    """Reader of the threads' times, for any thread. Without `/proc`, it finds no threads."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks = tasks
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def follow(self) -> None:
        """Find the threads of this process."""
        threads = set()
        with contextlib.suppress(OSError):
            threads = set(map(int, os.listdir(self._tasks)))
        with self._lock:
            for ended in self._files.keys() - threads:
                os.close(self._files.pop(ended))
            for started in threads - self._files.keys():
                with contextlib.suppress(OSError):
                    self._files[started] = os.open(
                        self._tasks / str(started) / "schedstat", os.O_RDONLY
                    )

    def read(self) -> dict[int, ThreadTime]:
        """Return the times of the threads that may work for the calling thread.

        These are the caller and the threads outside Python, such as those of OpenMP, as far as they
        existed at the last `follow`. Other threads of Python have work of their own.
        """
        others = {each.native_id for each in threading.enumerate()} - {threading.get_native_id()}
        times = {}
        with self._lock:
            for thread in self._files.keys() - others:
                with contextlib.suppress(OSError, ValueError):  # the thread has ended
                    ran, waited, _ = os.pread(self._files[thread], 100, 0).split()
                    times[thread] = ThreadTime(int(ran), int(waited))
        return times


def waits_ns(before: Mapping[int, ThreadTime], after: Mapping[int, ThreadTime]) -> list[int]:
    """Return the time that each thread waited between two readings.

    Linux counts a wait when it ends, so a wait may have begun before the first reading. The calling
    thread runs at both, and its waits lie between them.
    """
    return [after[each].waited - before[each].waited for each in after.keys() & before.keys()]
