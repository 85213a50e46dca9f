"""Shows what is copied from elsewhere: how much, how fast, and the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.storage.cached_copy import ProgressReport


@contextlib.contextmanager
def shown_arrivals(*, quiet: bool) -> Iterator[ProgressReport]:
    """Yield what `Dataset.open` and `Dataset.fetch` report to: a bar, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_interactive and not quiet  # elsewhere it prints empty lines
    progress = Progress(*columns, console=console, transient=True, disable=not shown)
    task = progress.add_task("", total=None)

    def report(arrived: int, total: int) -> None:
        progress.start()
        if progress.tasks[0].total != (total or None):
            progress.reset(task, total=total or None)
        progress.update(task, advance=arrived)

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()
