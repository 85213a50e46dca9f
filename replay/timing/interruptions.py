"""The interruptions of timed calls on a CPU by other programs.

Linux counts how long each thread waits for a processor (`/proc/self/task/*/schedstat`). A call is
interrupted if one of its threads waits for more than a tenth of the call's time.

The threads of a call wait for each other. On a busy machine, the scheduler often gives two of them
the same processor, and then no call runs without an interruption. After an interruption, the
threads are therefore kept on different cores until the sample ends.
"""

from __future__ import annotations

import contextlib
import os
from itertools import zip_longest
from pathlib import Path

from replay.timing.cores import core_siblings
from replay.timing.thread_times import TASKS, ThreadTime, ThreadTimes, waits_ns

SHARE = 0.9
"""Minimum share of a call's time in which no thread waits for a processor."""

WAKING_NS = 50_000
"""Longest wait that is ignored, in nanoseconds; a sleeping thread needs some time to start."""


class Interruptions:
    """Watch on the threads of this process, for one sample at a time.

    Without `/proc`, no call is interrupted.
    """

    def __init__(self, tasks: Path = TASKS) -> None:
        self._threads = ThreadTimes(tasks)
        self._before: dict[int, ThreadTime] = {}
        self._affinities: dict[int, set[int]] = {}
        self._waited_ns = self._total_ns = 0.0

    def begin_sample(self) -> None:
        """Find the threads of this process."""
        self._waited_ns = self._total_ns = 0.0
        self._threads.follow()

    def begin_call(self) -> None:
        """Read the threads' times, right before a call."""
        self._before = self._threads.read()

    def interrupted(self, seconds: float) -> bool:
        """Return True if a thread waited during the call that just took this many seconds."""
        after, before = self._threads.read(), self._before
        longest, total = max(waits_ns(before, after), default=0), seconds * 1e9
        self._waited_ns += min(longest, total)
        self._total_ns += total
        if longest <= max(WAKING_NS, (1 - SHARE) * total):
            return False
        if not self._affinities:
            active = {each: sum(after[each]) - sum(before[each]) for each in after.keys() & before}
            self._spread([each for each, ns in active.items() if ns > total / 10])
        return True

    def end_sample(self) -> float:
        """Let the threads run anywhere again; return the share of the time without a wait."""
        for thread, cpus in self._affinities.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cpus)
        self._affinities.clear()
        return 1 - self._waited_ns / self._total_ns if self._total_ns else 1.0

    def _spread(self, threads: list[int]) -> None:
        """Keep each thread on a processor of its own, on different cores where possible."""
        cores = core_siblings(os.sched_getaffinity(0))
        cpus = [cpu for turn in zip_longest(*cores) for cpu in turn if cpu is not None]
        if 1 < len(threads) <= len(cpus):
            for thread, cpu in zip(sorted(threads), cpus, strict=False):
                with contextlib.suppress(OSError):
                    self._affinities[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {cpu})
