"""Shows the progress of copies to the cache: size, speed and remaining time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.storage.cached_copy import ProgressReport


@contextlib.contextmanager
def shown_arrivals(*, quiet: bool) -> Iterator[ProgressReport]:
    """Yield a progress function for `Dataset.open` and `Dataset.fetch`.

    The function shows a progress bar if stderr is a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("copying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_interactive and not quiet  # without a terminal, a bar prints empty lines
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
