"""Progress bar of a replay on stderr: finished work, the kernel and call at work, and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from capture.text.printable import printable
from replay.bench.reported_stages import DONE
from replay.distribution.pace import Pace

if TYPE_CHECKING:
    from replay.workers.execution import Progress


REFRESHES_PER_SECOND = 4
"""Number of predictions per second; more would disturb what is measured on a CPU."""


class NowColumn(ProgressColumn):
    """Work that was reported last, such as `flex on llama-000003: compiling`.

    Args:
        first: text shown until any work is reported.
    """

    def __init__(self, pace: Pace, first: str) -> None:
        super().__init__(Column(no_wrap=True, ratio=1))
        self._pace = pace
        self._shown = first

    def render(self, task: Task) -> Text:
        self._shown = printable(self._pace.now) or self._shown
        return Text(self._shown)


class TimeColumn(ProgressColumn):
    """Remaining time, such as `0:01:20 left`, or the elapsed time until that is known."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left()
        shown = timedelta(seconds=round(self._pace.elapsed if left is None else left))
        return Text(f"{shown}" if left is None else f"{shown} left")


class Report(Protocol):
    """Function that receives a task and the stage that it reached."""

    def __call__(self, name: str, stage: str, device: str = "") -> None:
        """Receive a task's stage, or `DONE`."""


@contextlib.contextmanager
def shown_progress(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
    """Show the progress of a replay; yield a function that reports a call and its stage."""
    with shown_pace(pace, "starting workers", quiet=quiet) as report:
        yield lambda workload, stage, device="": report(workload.label, stage, device)


@contextlib.contextmanager
def shown_pace(pace: Pace, first: str, *, quiet: bool) -> Iterator[Report]:
    """Show the progress of named tasks; yield a function that reports a task and its stage.

    Args:
        first: text shown until a task reports its first stage.
    """
    columns = (
        MofNCompleteColumn(),
        NowColumn(pace, first),
        BarColumn(bar_width=16),
        TimeColumn(pace),
    )
    console = Console(stderr=True)
    with rich.progress.Progress(
        *columns,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        disable=quiet or not console.is_terminal,
        expand=True,
    ) as progress:
        task = progress.add_task("", total=pace.total)

        def report(name: str, stage: str, device: str = "") -> None:
            if stage == DONE:
                pace.leave(name)
            else:
                pace.enter(name, stage, device)
            progress.update(task, completed=pace.done)

        yield report
        pace.finish()
