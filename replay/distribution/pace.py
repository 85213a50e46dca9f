"""The times of a replay's kernels and calls, and the prediction of the remaining time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capture.text.counted import counted
from replay.bench.reported_stages import DONE, FIRST_CALLS_DONE, LOADING, STAGES, TIMING
from replay.distribution.call_at_work import CHECKS, UNNAMED, CallAtWork
from replay.distribution.time_limit import TimeLimit

logger = logging.getLogger(__name__)

SHARES = {CHECKS: 0.2, TIMING: 0.8}
"""Shares of the parts in a call's expected seconds; measured times correct them."""
COMPILING_SECONDS = 1.0
"""Length of a first call that shows that it compiles, if a usual check is shorter."""


class KernelWork(NamedTuple):
    """The kernels that run on each call of a replay."""

    names: Sequence[str]
    """Names of the kernels, as stages report them."""
    forms: Mapping[str, Hashable]
    """Form of each call; a kernel may compile again for each form."""


class Pace:
    """Times of the finished work of a replay, which predict the time of the remaining work.

    The work on a call is to check its kernels and then to time them. Each part has expected
    seconds, which are multiplied by the ratio of measured to expected seconds of finished work.
    First calls are apart, because they may compile: a kernel's last first call on a new form
    predicts the next one, and the mean of all kernels predicts that of a kernel without any.

    Args:
        expected: seconds expected for each call, without compilation; only the proportions matter
            once some work is finished.
        at_a_time: number of calls that run at the same time.
        clock: function that returns seconds since any start.
        kernels: the kernels that run on each call; None if a call is a single piece of work. An
            added baseline joins them once it is reported.
        limit: the time limit, at which calls other than the first are stopped.
    """

    def __init__(
        self,
        expected: Mapping[str, float],
        at_a_time: int = 1,
        clock: Callable[[], float] = time.monotonic,
        kernels: KernelWork | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        self.expected = expected
        self.at_a_time = at_a_time
        self.finished: set[str] = set()
        """Calls that are finished."""
        self.first_call_seconds = 0.0
        """Duration of the call that was finished first; 0 if none is finished."""
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds of each stage; the work of each kernel is a stage with the kernel's name."""
        self._lock = threading.RLock()  # the display reads in a thread of its own
        self._clock = clock
        self._start = clock()
        self._kernels = kernels
        self._limit = TimeLimit(None) if limit is None else limit
        self._names = [] if kernels is None else [*kernels.names]
        self._shares = {UNNAMED: 1.0} if kernels is None else SHARES
        self._last = "", ""
        self._at_work: dict[tuple[str, str], CallAtWork] = {}
        """Calls at work, by call and device."""
        self._worked: dict[tuple[str, Hashable], _Worked] = defaultdict(_Worked)
        """Work on finished calls, by part and form."""
        self._first: dict[tuple[str, bool], float] = {}
        """Seconds of each kernel's last first call on a new form (True) and on a known one."""
        self._known: set[tuple[Hashable, str]] = set()
        """Forms and kernels whose first call is over."""

    @property
    def total(self) -> int:
        """Return the number of pieces of work: each kernel on each call, or each call."""
        return len(self.expected) * max(len(self._names), 1)

    @property
    def done(self) -> int:
        """Return the number of finished pieces; a kernel that is checked but not timed is half."""
        with self._lock:
            pieces = float(len(self.finished) * max(len(self._names), 1))
            for work in self._at_work.values():
                pieces += len(work.refused) + len(work.checked) / 2
            return int(pieces)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def now(self) -> str:
        """Return the work reported last, such as `flex on llama-000003: compiling`.

        It is empty before any work and after a call.
        """
        with self._lock:
            work, place = self._at_work.get(self._last), ", ".join(filter(None, self._last))
            if work is None:
                return ""
            if work.stage not in self._names:
                return f"{place}: {work.stage}"
            return f"{work.stage} on {place}: {self._doing(work)}"

    def _doing(self, work: CallAtWork) -> str:
        if not work.is_first_call:
            return "timing" if work.part == TIMING else "checking"
        call = self._last[0]
        check = self._rate(CHECKS, self._form(call)) * self.expected[call] / len(self._names)
        is_long = self._since(work) > max(COMPILING_SECONDS, check)
        return "compiling" if is_long else "first call"

    def left(self) -> float | None:
        """Return the predicted seconds until all calls are done; None without a prediction."""
        with self._lock:
            calls = [call for call in self.expected if call not in self.finished]
            if not calls or not self._rate(next(iter(self._shares)), None):
                return None
            left = self.seconds(calls) / min(self.at_a_time, len(calls))
            first = 0.0 if self.finished else self.seconds({call for call, _ in self._at_work})
            return min(left, max(self._limit.left, first))

    def seconds(self, calls: Iterable[str]) -> float:
        """Return the predicted seconds of unfinished calls, one after another.

        The result is 0 without a prediction.
        """
        by_form: dict[Hashable, list[str]] = defaultdict(list)
        for call in calls:
            by_form[self._form(call)].append(call)
        return sum(
            self._steady(form, own) + self._first_calls(form, own) for form, own in by_form.items()
        )

    def _form(self, call: str) -> Hashable:
        return None if self._kernels is None else self._kernels.forms.get(call)

    def _steady(self, form: Hashable, calls: Sequence[str]) -> float:
        """Return the predicted seconds of calls of a form, without first calls."""
        at_work, left = {call: work for (call, _), work in self._at_work.items()}, 0.0
        for part in self._shares:
            rate = self._rate(part, form)
            for call in calls:
                seconds = rate * self.expected[call]
                if call in at_work:
                    work = at_work[call]
                    if part == CHECKS:
                        seconds *= 1 - work.checks_done
                    else:
                        seconds -= work.spent[part]
                    if part == work.part and not work.is_first_call:
                        seconds -= self._since(work)
                left += max(seconds, 0.0)
        return left

    def _first_calls(self, form: Hashable, calls: Sequence[str]) -> float:
        """Return the predicted seconds of kernels' first calls on calls of a form."""
        works = [work for (call, _), work in self._at_work.items() if call in calls]
        mean, left = self._mean_first_call(), 0.0
        for name in self._names:
            once = self._first.get((name, True), mean)
            again = self._first.get((name, False), 0.0)
            is_known = (form, name) in self._known
            running = [work for work in works if work.is_first_call and work.stage == name]
            for work in running:
                left += max((again if is_known else once) - self._since(work), 0.0)
            count = len(calls) - sum(name in work.began for work in works)
            is_new = bool(count) and not is_known and not running
            left += count * again + is_new * (once - again)
        return left

    def _mean_first_call(self) -> float:
        """Return the mean seconds of kernels' first calls on new forms.

        A running one counts with its seconds so far if it is longer than the others.
        """
        times = [seconds for (_, is_new), seconds in self._first.items() if is_new]
        mean = sum(times) / max(len(times), 1)
        running = [self._since(work) for work in self._at_work.values() if work.is_first_call]
        times += [seconds for seconds in running if seconds > mean]
        return sum(times) / max(len(times), 1)

    def _since(self, work: CallAtWork) -> float:
        return self._clock() - work.since

    def _rate(self, part: str, form: Hashable) -> float:
        """Return the measured seconds of a part of a call for each expected second of the call.

        Calls of the same form count, or else all calls, or else the other part of all calls.
        """
        if (part, form) in self._worked:
            return self._shares[part] * self._worked[part, form].scale
        worked = {each: _Worked() for each in self._shares}
        for (each, _), found in self._worked.items():
            worked[each].add(found.spent, found.expected)
        slowest = 0.0
        for (call, _), work in self._at_work.items():
            if self._kernels is not None:
                expected = self._shares[CHECKS] * self.expected[call] * work.checks_done
                worked[CHECKS].add(work.spent[CHECKS], expected)
            # The share that is over is unknown, but not above 1. The first of several calls without
            # known kernels says nothing about its own end.
            if part != CHECKS and (self._kernels is not None or self.finished):
                expected = self._shares[part] * self.expected.get(call, math.inf)
                slowest = max(slowest, work.spent[part] / expected)
        scales = (worked[part].scale, *(found.scale for found in worked.values()))
        return self._shares[part] * max(next(filter(None, scales), 0.0), slowest)

    def enter(self, call: str, stage: str, device: str = "") -> None:
        """Note that a call reached a stage, which may be a kernel's name."""
        with self._lock:
            self._last = call, device
            if self._kernels is not None and stage not in (*STAGES, *self._names):
                self._names.append(stage)  # the baseline, which a call may choose
            if stage == LOADING:  # any other device has given up the call
                self._drop(call, device)
            work = self._at_work.setdefault(self._last, CallAtWork(self._names, self._clock()))
            self._reach(call, work, stage)
            if stage == FIRST_CALLS_DONE:
                del self._at_work[self._last]

    def leave(self, call: str) -> None:
        """Note that a call is finished."""
        with self._lock:
            works = [work for (name, _), work in self._at_work.items() if name == call]
            work, form = [*works, CallAtWork(self._names, self._clock())][0], self._form(call)
            self._reach(call, work, DONE)
            for part, share in self._shares.items():
                self._worked[part, form].add(work.spent[part], share * self.expected[call])
            self._drop(call)
            if not self.finished:
                self.first_call_seconds = sum(work.stages.values())
            self.finished.add(call)
        logger.info("%s took %s", call, seconds_by_stage(work.stages))
        for stage, seconds in work.stages.items():
            self.stages[stage] += seconds

    def _reach(self, call: str, work: CallAtWork, stage: str) -> None:
        ended = work.enter(stage, self._clock())
        if ended is not None:
            key = self._form(call), ended.kernel
            self._first[ended.kernel, key not in self._known] = ended.seconds
            self._known.add(key)

    def _drop(self, call: str, but: str | None = None) -> None:
        for key in [key for key in self._at_work if key[0] == call and key[1] != but]:
            del self._at_work[key]

    def finish(self) -> None:
        """Note that no more calls will run."""
        if self.finished:
            calls = counted(len(self.finished), "call")
            logger.info("%s took %s", calls, seconds_by_stage(self.stages))


@dataclass
class _Worked:
    """Finished work."""

    spent: float = 0.0
    """Measured seconds."""
    expected: float = 0.0

    @property
    def scale(self) -> float:
        """Return the ratio of measured to expected seconds; 0 without any work."""
        return self.spent / self.expected if self.expected else 0.0

    def add(self, spent: float, expected: float) -> None:
        self.spent += spent
        self.expected += expected


def seconds_by_stage(stages: Mapping[str, float]) -> str:
    """Format times as `8.1 s: 5.2 torch-math, 2.9 computing the reference`, longest first."""
    longest = sorted(stages.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{seconds:.1f} {stage}" for stage, seconds in longest if seconds >= 0.05)
    return f"{sum(stages.values()):.1f} s: {parts}"
