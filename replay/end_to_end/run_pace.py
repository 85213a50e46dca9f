"""Finished and remaining runs of models, which predict the time left."""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

logger = logging.getLogger(__name__)

BUILDING = "building the model"
COUNTING = "counting attention calls"
NEIGHBOURS = 2
"""Number of kernels per baseline run in a round."""


def expected_runs(names: Sequence[str], rounds: int, *, is_new: bool) -> Counter[str]:
    """Count the remaining runs of a process by name: the rounds, and a run that is inspected.

    Args:
        names: the baseline, then the kernels.
        is_new: add the first runs, and what a new process does besides.
    """
    own, *others = names
    groups = -(-len(others) // NEIGHBOURS) or 1
    runs = Counter(dict.fromkeys(names, rounds + 1 + is_new))
    return runs + Counter({own: rounds * (groups - 1), BUILDING: is_new, COUNTING: is_new})


class RunPace:
    """Times of finished runs, which predict the time of the remaining ones.

    A first run in a process may compile: a kernel's last first run predicts the next one, and the
    mean of all kernels predicts that of a kernel without any. Another run takes as long as the
    kernel's median, or else that of all kernels, or else the shortest first run.

    Args:
        clock: function that returns seconds since any start.

    Attributes:
        now: the current stage.
        model: name of the model, shown before the stage.
        left_by_process: remaining runs of each process by name; the first process is at work.
        changed: called after each stage and run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = 0
        self.now = self.model = ""
        self.left_by_process: list[Counter[str]] = []
        self.changed: Callable[[], None] = lambda: None
        self._clock, self._start = clock, clock()
        self._lock = threading.RLock()  # the display reads in a thread of its own
        self._running = ("", self._start)
        self._first: dict[str, float] = {}
        """Seconds of the last first run, by name."""
        self._later: dict[str, list[float]] = defaultdict(list)
        self._known: set[str] = set()
        """Names that ran in the process at work."""

    @property
    def total(self) -> int:
        """Return the number of runs, finished or not."""
        with self._lock:
            return self.done + sum(runs.total() for runs in self.left_by_process)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def left(self) -> float | None:
        """Return the predicted seconds of the remaining runs; None before the first run ends."""
        with self._lock:
            timed = [seconds for name, seconds in self._first.items() if name != BUILDING]
            if not timed:
                return None
            later = [each for seconds in self._later.values() for each in seconds]
            typical = statistics.median(later) if later else min(timed)
            first = statistics.mean(timed[1:] or timed)  # the baseline's is not compiled
            left = 0.0
            for at, runs in enumerate(self.left_by_process):
                for name, count in runs.items():
                    own = statistics.median(self._later[name]) if name in self._later else typical
                    left += count * own
                    if count and (at or name not in self._known):
                        left += self._first.get(name, first) - own
            name, begin = self._running
            return max(left - (self._clock() - begin if name else 0.0), 0.0)

    def expect(self, runs: Counter[str]) -> None:
        """Set the remaining runs of the process at work."""
        with self._lock:
            self.left_by_process[:1] = [runs]
        self.changed()

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Time a run."""
        begin = self._clock()
        self._running = name, begin
        try:
            yield
        finally:
            with self._lock:
                seconds = self._clock() - begin
                if name in self._known:
                    self._later[name].append(seconds)
                else:
                    self._first[name] = seconds
                    self._known.add(name)
                self._running = "", 0.0
                self.done += 1
                for left in self.left_by_process[:1]:
                    left[name] = max(left[name] - 1, 0)
            self.changed()

    def close_process(self) -> None:
        """Note that the process at work does no other run."""
        with self._lock:
            del self.left_by_process[:1]
            self._known.clear()

    def enter(self, stage: str) -> None:
        """Note the stage of the run at work."""
        stage = ": ".join(filter(None, (self.model, stage)))
        if stage != self.now:
            logger.info("%s", stage)
            self.now = stage
        self.changed()
