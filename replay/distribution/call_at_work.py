"""A call that is being replayed, followed through the stages that its workers report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from replay.bench.reported_stages import FIRST_CALLS, LOADING, REFERENCE, STAGES, TIMING

CHECKS = "checks"
"""Part of a call's work before `TIMING`."""
UNNAMED = ""
"""Part of a call whose worker reports no parts."""

_PARTS = {FIRST_CALLS: FIRST_CALLS, LOADING: CHECKS, REFERENCE: CHECKS, TIMING: TIMING}
"""Parts of a call's work, by the stage that begins them."""
_RUNS_OF_CHECK = 3
"""Number of a kernel's runs while it is checked."""


class FirstCall(NamedTuple):
    """First call of a kernel that ended."""

    kernel: str
    seconds: float
    """Duration; 0 if the kernel refused the call."""


class CallAtWork:
    """A call on one device.

    A kernel is reported once when its check begins, and again before each of its runs. The first of
    these runs may compile, so its time is apart from the other times. A kernel without any run has
    refused the call.

    Args:
        kernels: names of the kernels whose work is counted; it may grow.
        now: time when the work on the call begins, in seconds.
    """

    def __init__(self, kernels: Collection[str], now: float) -> None:
        self._kernels = kernels
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds of each stage; the work of each kernel is a stage with the kernel's name."""
        self.spent: dict[str, float] = defaultdict(float)
        """Seconds of each part, without first calls."""
        self.part, self.stage, self.since = UNNAMED, "", now
        self.began: set[str] = set()
        """Kernels whose check began."""
        self.checked: set[str] = set()
        """Kernels that ran and were checked."""
        self.refused: set[str] = set()
        self._is_checking = False
        self._reports = 0
        """Number of reports of the kernel that is being checked."""

    @property
    def is_first_call(self) -> bool:
        """True while a kernel runs on the call for the first time."""
        return self._is_checking and self._reports == 2

    @property
    def checks_done(self) -> float:
        """Share of the checks that is over; to load the call is as much as to check a kernel."""
        runs = min(max(self._reports - 1, 0), _RUNS_OF_CHECK)
        done = bool(self.began) + len(self.checked) + runs / (_RUNS_OF_CHECK + 1)
        return done / (1 + len(self._kernels) - len(self.refused))

    def enter(self, stage: str, now: float) -> FirstCall | None:
        """Note that the call reached a stage: one of `STAGES`, or a kernel's name.

        Returns:
            The first call that ended, if any.
        """
        ended, seconds = None, now - self.since
        if self.stage:
            self.stages[self.stage] += seconds
        if self.is_first_call:
            ended = FirstCall(self.stage, seconds)
        else:
            self.spent[self.part] += seconds
        if self._reports and stage != self.stage:
            if self._reports == 1:
                ended = FirstCall(self.stage, 0.0)
            if self.part == CHECKS:
                (self.refused if self._reports == 1 else self.checked).add(self.stage)
            self._reports = 0
        if stage in STAGES:
            self.part = _PARTS.get(stage, self.part)
            self._is_checking = stage in (REFERENCE, FIRST_CALLS)
        elif stage in self._kernels and self._is_checking:
            self._reports += 1
            if self.part == CHECKS:
                self.began.add(stage)
        self.stage, self.since = stage, now
        return ended
