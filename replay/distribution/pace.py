"""The times of a replay's calls, and the prediction of the remaining time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from capture.text.counted import counted

logger = logging.getLogger(__name__)


class Pace:
    """Times of the finished calls of a replay, which predict the time of the remaining calls.

    Args:
        expected: seconds expected for each call; only the proportions matter once some calls are
            finished.
        at_a_time: number of calls that run at the same time.
        clock: function that returns seconds since any start.
    """

    def __init__(
        self,
        expected: Mapping[str, float],
        at_a_time: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expected = expected
        self.at_a_time = at_a_time
        self._clock = clock
        self._start = clock()
        self._at_work: dict[str, _AtWork] = {}
        self._took: dict[str, float] = {}
        """Seconds of each finished call."""
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds of each stage; the work of each kernel is a stage with the kernel's name."""

    @property
    def total(self) -> int:
        return len(self.expected)

    @property
    def done(self) -> int:
        return len(self._took)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def is_reliable(self) -> bool:
        """Return whether any call has finished without waiting for compilers."""
        return self.done > self.at_a_time

    @property
    def scale(self) -> float | None:
        """Return the ratio of measured to expected seconds; None before any call is finished.

        The first call on each device waits for compilers, so it counts only until other calls are
        finished.
        """
        counted = list(self._took)[self.at_a_time :] or self._took
        if not counted:
            return None
        expected = sum(self.expected[call] for call in counted)
        return sum(self._took[call] for call in counted) / expected

    def left(self) -> float | None:
        """Return the predicted seconds until all calls are done; None without a prediction."""
        if self.scale is None or self.done >= self.total:
            return None
        now, left = self._clock(), 0.0
        for call, expected in self.expected.items():
            if call not in self._took:
                at_work = self._at_work.get(call)
                so_far = 0.0 if at_work is None else now - at_work.began
                left += max(expected * self.scale - so_far, 0.0)
        return left / self.at_a_time

    def enter(self, call: str, stage: str) -> None:
        """Note that a call reached a stage."""
        now = self._clock()
        self._at_work.setdefault(call, _AtWork(now)).enter(stage, now)

    def leave(self, call: str) -> None:
        """Note that a call is finished."""
        now = self._clock()
        at_work = self._at_work.pop(call, None) or _AtWork(now)
        at_work.enter("", now)
        self._took[call] = now - at_work.began
        logger.info("%s took %s", call, seconds_by_stage(at_work.stages))
        for stage, seconds in at_work.stages.items():
            self.stages[stage] += seconds

    def finish(self) -> None:
        """Note that no more calls will run."""
        if self.done:
            logger.info("%s took %s", counted(self.done, "call"), seconds_by_stage(self.stages))


class _AtWork:
    """A call that is running."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds of each stage."""
        self._stage, self._stage_began = "", began

    def enter(self, stage: str, now: float) -> None:
        if self._stage:
            self.stages[self._stage] += now - self._stage_began
        self._stage, self._stage_began = stage, now


def seconds_by_stage(stages: Mapping[str, float]) -> str:
    """Format times as `8.1 s: 5.2 torch-math, 2.9 computing the reference`, longest first."""
    longest = sorted(stages.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{seconds:.1f} {stage}" for stage, seconds in longest if seconds >= 0.05)
    return f"{sum(stages.values()):.1f} s: {parts}"
