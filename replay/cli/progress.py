"""Progress of a replay on stderr: the call at work, how many are done, and the time left."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.bench.runner import DONE

if TYPE_CHECKING:
    from replay.workers.execution import Progress
    from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)


class Pace:
    """How long the calls of a replay take, and what that says of those to come.

    Args:
        expected: seconds that each call may take, of which only the proportions count once some are
            finished.
        at_a_time: calls that are at work together.
        scale: seconds that calls took by seconds expected, in earlier replays.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        expected: Mapping[str, float],
        at_a_time: int = 1,
        scale: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expected = expected
        self.at_a_time = at_a_time
        self._earlier_scale = scale
        self._clock = clock
        self._start = clock()
        self._at_work: dict[str, _AtWork] = {}
        self._took: dict[str, float] = {}
        """Seconds of the calls that are finished."""
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds by stage, those of kernels by their names."""

    @property
    def total(self) -> int:
        """Calls that there are."""
        return len(self.expected)

    @property
    def done(self) -> int:
        """Calls that are finished."""
        return len(self._took)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def is_reliable(self) -> bool:
        """Whether calls are finished that had not to wait for compilers."""
        return self.done > self.at_a_time

    @property
    def scale(self) -> float | None:
        """Seconds that calls took by seconds expected; None where nobody knows yet.

        The first on each device, which wait for compilers, count only until there are others, and
        where nothing is known from earlier replays.
        """
        if not self.is_reliable and self._earlier_scale is not None:
            return self._earlier_scale
        counted = list(self._took)[self.at_a_time :] or self._took
        if not counted:
            return None
        expected = sum(self.expected[call] for call in counted)
        return sum(self._took[call] for call in counted) / expected

    @property
    def proven_scale(self) -> float | None:
        """As `scale`, but never from first calls, which are no reason to leave others out."""
        return self.scale if self.is_reliable else self._earlier_scale

    def left(self) -> float | None:
        """Seconds that the remaining calls will take; None where nobody knows yet."""
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
        """Note that there will be no more calls."""
        if self.done:
            logger.info("%s took %s", counted(self.done, "call"), seconds_by_stage(self.stages))


class _AtWork:
    """A call that is not finished."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds by stage."""
        self._stage, self._stage_began = "", began

    def enter(self, stage: str, now: float) -> None:
        if self._stage:
            self.stages[self._stage] += now - self._stage_began
        self._stage, self._stage_began = stage, now


def seconds_by_stage(stages: Mapping[str, float]) -> str:
    """Format as `8.1 s: 5.2 torch-math, 2.9 computing the reference`, the longest first."""
    longest = sorted(stages.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{seconds:.1f} {stage}" for stage, seconds in longest if seconds >= 0.05)
    return f"{sum(stages.values()):.1f} s: {parts}"


class TimeColumn(ProgressColumn):
    """`1:20 left`; the time so far in `0:12` while that is all one can know."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left()
        return Text(
            _clock_time(self._pace.elapsed) if left is None else f"{_clock_time(left)} left"
        )


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def shown_progress(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
    """Show how far a replay is; yield what takes a call and its stage."""
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeColumn(pace),
    )
    console = Console(stderr=True)
    with rich.progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        expand=True,
    ) as progress:
        task = progress.add_task("starting workers", total=pace.total)

        def report(workload: Workload, stage: str) -> None:
            if stage == DONE:
                pace.leave(workload.label)
                progress.update(task, completed=pace.done)
                return
            pace.enter(workload.label, stage)
            progress.update(task, description=printable(f"{workload.label}: {stage}"))

        yield report
        pace.finish()
