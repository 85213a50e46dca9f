"""Progress bar of a replay on stderr: finished work, the kernel and call at work, and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from capture.text.printable import printable
from replay.bench.reported_stages import DONE
from replay.distribution.pace import Pace
from replay.end_to_end.run_pace import RunPace

if TYPE_CHECKING:
    from replay.workers.execution import Progress
    from replay.workloads.workload import Workload


REFRESHES_PER_SECOND = 4
"""Number of predictions per second; more would disturb what is measured on a CPU."""


class NowColumn(ProgressColumn):
    """Work that was reported last, such as `flex on llama-000003: compiling`.

    Args:
        first: text shown until any work is reported.
    """

    def __init__(self, pace: Pace | RunPace, first: str) -> None:
        super().__init__(Column(no_wrap=True, ratio=1))
        self._pace = pace
        self._shown = first

    def render(self, task: Task) -> Text:
        self._shown = printable(self._pace.now) or self._shown
        return Text(self._shown)


class TimeColumn(ProgressColumn):
    """Remaining time, such as `0:01:20 left`, or the elapsed time until that is known."""

    def __init__(self, pace: Pace | RunPace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left()
        shown = timedelta(seconds=round(self._pace.elapsed if left is None else left))
        return Text(f"{shown}" if left is None else f"{shown} left")


Hidden = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def shown_progress(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
    """Show the progress of a replay; yield a function that reports a call and its stage."""
    with _bar(pace, "starting workers", quiet=quiet) as (refresh, _):

        def report(workload: Workload, stage: str, device: str = "") -> None:
            if stage == DONE:
                pace.leave(workload.label)
            else:
                pace.enter(workload.label, stage, device)
            refresh()

        yield report
        pace.finish()


@contextlib.contextmanager
def shown_runs(pace: RunPace, first: str, *, quiet: bool) -> Iterator[Hidden]:
    """Show the progress of a model's runs; yield a function that hides it in a `with` block.

    Args:
        first: text shown until the first stage.
    """
    with _bar(pace, first, quiet=quiet) as (refresh, hidden):
        pace.changed = refresh
        yield hidden


@contextlib.contextmanager
def _bar(
    pace: Pace | RunPace, first: str, *, quiet: bool
) -> Iterator[tuple[Callable[[], None], Hidden]]:
    """Show a bar; yield a function that shows the finished work, and one that hides the bar."""
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

        @contextlib.contextmanager
        def hidden() -> Iterator[None]:
            progress.stop()
            yield
            progress.start()

        yield lambda: progress.update(task, completed=pace.done, total=pace.total), hidden
