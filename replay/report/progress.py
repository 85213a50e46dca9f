"""Progress bar of a replay on stderr, with the current call, finished calls and remaining time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from capture.text.printable import printable
from replay.bench.runner import DONE
from replay.distribution.pace import Pace

if TYPE_CHECKING:
    from replay.workers.execution import Progress


class TimeColumn(ProgressColumn):
    """Remaining time, such as `0:01:20 left`, or the elapsed time until that is known."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left()
        shown = timedelta(seconds=round(self._pace.elapsed if left is None else left))
        return Text(f"{shown}" if left is None else f"{shown} left")


@contextlib.contextmanager
def shown_progress(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
    """Show the progress of a replay; yield a function that reports a call and its stage."""
    with shown_pace(pace, "starting workers", quiet=quiet) as report:
        yield lambda workload, stage: report(workload.label, stage)


@contextlib.contextmanager
def shown_pace(pace: Pace, first: str, *, quiet: bool) -> Iterator[Callable[[str, str], None]]:
    """Show the progress of named tasks; yield a function that reports a task and its stage.

    Args:
        first: text shown until a task reports its first stage.
    """
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
        task = progress.add_task(first, total=pace.total)

        def report(name: str, stage: str) -> None:
            if stage == DONE:
                pace.leave(name)
                progress.update(task, completed=pace.done)
                return
            pace.enter(name, stage)
            progress.update(task, description=printable(f"{name}: {stage}"))

        yield report
        pace.finish()
