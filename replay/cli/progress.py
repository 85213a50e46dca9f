"""Progress of a replay on stderr: the call at work, how many are done, and the time left."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from capture.printable import printable

if TYPE_CHECKING:
    from replay.workloads.recorded import Workload

logger = logging.getLogger(__name__)


class Pace:
    """How long the calls of a replay take, and what that says of those to come.

    Args:
        total: number of calls.
        clock: seconds, from any start.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._start = self._first_began = clock()
        self._finished: list[float] = []
        self._call = ""
        self._stage = ""
        self._stage_began = self._start
        self._of_call: dict[str, float] = defaultdict(float)
        self.stages: dict[str, float] = defaultdict(float)
        """Seconds by stage, those of kernels by their names."""

    @property
    def done(self) -> int:
        """Calls that are finished."""
        return len(self._finished)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def left(self) -> float | None:
        """Seconds that the remaining calls will take; None before the first is finished.

        The first call, which waits for compilers, counts only until there is another.
        """
        if not self._finished or self.done >= self._total:
            return None
        if self.done == 1:
            mean = self._finished[0] - self._first_began
        else:
            mean = (self._finished[-1] - self._finished[0]) / (self.done - 1)
        of_this_call = max(mean - (self._clock() - self._finished[-1]), 0.0)
        return of_this_call + mean * (self._total - self.done - 1)

    def enter(self, call: str, stage: str) -> None:
        """Note that a call reached a stage; a call begins when the one before it is finished."""
        now = self._clock()
        if not self._call:
            self._first_began = now
        self._leave_stage(now)
        if self._call and call != self._call:
            self._leave_call(now)
        self._call, self._stage, self._stage_began = call, stage, now

    def finish(self) -> None:
        """Note that the last call is finished."""
        now = self._clock()
        self._leave_stage(now)
        if self._call:
            self._leave_call(now)
            logger.info("%d calls took %s", self.done, seconds_by_stage(self.stages))
        self._call = self._stage = ""

    def _leave_stage(self, now: float) -> None:
        if self._stage:
            self._of_call[self._stage] += now - self._stage_began

    def _leave_call(self, now: float) -> None:
        logger.info("%s took %s", self._call, seconds_by_stage(self._of_call))
        for stage, seconds in self._of_call.items():
            self.stages[stage] += seconds
        self._of_call.clear()
        self._finished.append(now)


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
def shown_progress(total: int, *, quiet: bool) -> Iterator[Callable[[Workload, str], None]]:
    """Show how far a replay of `total` calls is; yield what takes a call and its stage."""
    pace = Pace(total)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeColumn(pace),
    )
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        expand=True,
    ) as progress:
        task = progress.add_task("starting workers", total=total)

        def report(workload: Workload, stage: str) -> None:
            pace.enter(workload.name, stage)
            description = printable(f"{workload.name}: {stage}")
            progress.update(task, completed=pace.done, description=description)

        yield report
        pace.finish()
