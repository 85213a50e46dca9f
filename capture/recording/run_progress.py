"""Progress of a recorded run on a terminal: steps, kept calls, elapsed and remaining time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from capture.recording.sampling import PER_LAYER
from capture.text.counted import counted, human_bytes

if TYPE_CHECKING:
    from capture.recording.recording import Recording


class StepTimes:
    """Estimate of a run's remaining time in seconds, from the times at which its steps began."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._latest = 0, 0.0

    def left(self, begun: int, total: int, now: float) -> float | None:
        """Return the time until the last step ends; None if no step has ended yet.

        Args:
            begun: number of steps that have begun at the time `now`.
        """
        if not begun:
            return None
        if self._first is None:
            self._first = self._latest = begun, now
        if begun > self._latest[0]:
            self._latest = begun, now
        steps = self._latest[0] - self._first[0]
        if not steps:
            return None
        each = (self._latest[1] - self._first[1]) / steps
        return max(0.0, (total - begun + 1) * each - (now - self._latest[1]))


def steps(runnable: Any, recording: Recording) -> tuple[int, int | None]:
    """Return the numbers of begun and of all steps of a `models.Runnable`; None if unknown.

    A step is a denoising step of a pipeline, or the forward pass of a language model that makes a
    token. A pipeline knows the number only once its scheduler is set up.
    """
    if runnable.pipeline is None:
        return recording.steps_begun({"prefill", "decode"}), runnable.extent.get("new_tokens")
    return recording.steps_begun({"denoise"}), getattr(runnable.pipeline, "num_timesteps", None)


@contextlib.contextmanager
def shown_progress(
    runnable: Any, recording: Recording, max_calls: int | str, console: Any
) -> Iterator[None]:
    """Show the progress of a recorded run until the exit, if the console is a terminal."""
    began, times = time.monotonic(), StepTimes()

    def line() -> Table:
        now = time.monotonic()
        begun, total = steps(runnable, recording)
        left = None if total is None else times.left(begun, total, now)
        unit = "token" if runnable.pipeline is None else "step"
        step = f"{unit} {begun} of {total} · " if begun and total is not None else ""
        if step and begun == total and left == 0:  # such as decoding an image
            step = f"finishing after {step}"
        spent = str(timedelta(seconds=round(now - began)))
        table = Table.grid(
            Column(no_wrap=True, ratio=1),
            Column(),
            Column(no_wrap=True),
            expand=True,
            padding=(0, 1),
        )
        table.add_row(
            Text(f"{step}{_kept(recording, max_calls)}"),
            ProgressBar(total, max(begun - 1, 0), width=12, pulse=total is None),
            Text(spent + (f", {timedelta(seconds=round(left))} left" if left else "")),
        )
        return table

    with Live(get_renderable=line, console=console, refresh_per_second=8, transient=True):
        yield


def _kept(recording: Recording, max_calls: int | str) -> str:
    if not recording.kept:
        return f"{counted(recording.seen, 'call')} seen, none kept yet"
    part = "" if max_calls == PER_LAYER else f"{recording.kept:,} of "
    number = recording.kept if max_calls == PER_LAYER else int(max_calls)
    return f"{part}{counted(number, 'call')} kept, {human_bytes(recording.counts.nbytes)}"
