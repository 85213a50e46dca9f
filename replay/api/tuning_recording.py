"""Recording of a tuning: calls of every layer at some denoising steps, made once."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.text.counted import counted, human_bytes
from replay.api.messages import say

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.tune.directory import TuningDirectory


def recorded(
    runnable: Any,
    run: Callable[[], object],
    files: TuningDirectory,
    *,
    quiet: bool,
    most: int | None = None,
) -> CaptureRecord:
    """Record calls of every layer at some steps, unless the directory holds the recording.

    Args:
        runnable: the model (`models.Runnable`).
        run: function that runs the model once.
        quiet: True to hide progress, and the disk space that the recording takes.
        most: largest number of calls of denoising steps; None for no limit.

    Raises:
        TuningError: the model makes no attention call or other calls than the recorded ones, or the
            disk is too small.
    """
    from capture.errors import DatasetError
    from capture.storage.dataset import Dataset
    from replay.end_to_end.census_check import counting, difference
    from replay.tune.directory import TuningError

    with counting(runnable.roots) as census:
        run()
    counts = census.to_json()
    if not counts["rows"]:
        raise TuningError(
            "run() made no attention call that can be recorded: docs/recording.md lists the entry "
            "points"
        )
    with contextlib.suppress(DatasetError, OSError):
        for capture in Dataset.open(str(files.recording)).captures:
            if not capture.complete:
                continue
            if changed := difference(capture.census, counts):
                raise TuningError(f"{changed}, or delete {files.path}")
            if not quiet:
                say(f"going on with the recording, the rows and the judged plans in {files.path}")
            return capture
    _record(runnable, run, files, counts, quiet, most)
    return Dataset.open(str(files.recording)).captures[0]


def _record(
    runnable: Any,
    run: Callable[[], object],
    files: TuningDirectory,
    counts: dict[str, Any],
    quiet: bool,
    most: int | None,
) -> None:
    from rich.console import Console

    from capture.recording.record import record
    from capture.recording.run_progress import shown_progress
    from capture.recording.sampling import PER_LAYER
    from replay.tune.directory import TuningError
    from replay.tune.recorded_calls import chosen_steps, size

    free = shutil.disk_usage(files.path).free
    steps = chosen_steps(counts, free, most)
    calls, nbytes = size(counts, steps)
    disk = f"about {human_bytes(nbytes)} for {counted(calls, 'call')} in {files.recording}"
    if nbytes > free:
        raise TuningError(
            f"the recording needs {disk}, where {human_bytes(free)} are free: make room, or write "
            "the plan to another disk"
        )
    if not quiet:
        say(f"recording: {disk} ({human_bytes(free)} free)")
    with (
        _without_warnings(),
        record(
            runnable.roots if runnable.pipeline is None else runnable.pipeline,
            out=files.recording,
            max=PER_LAYER,
            steps=steps or None,
            name=Path(runnable.name).name,
            weights=runnable.weights,
            settings=runnable.settings,
            overwrite=True,
        ) as recording,
    ):
        console = Console(stderr=True, quiet=quiet)
        with shown_progress(runnable, recording, PER_LAYER, console):
            run()
    if not recording.kept:
        raise TuningError(f"no attention call was recorded: {'; '.join(recording.problems)}")
    if recording.problems and not quiet:
        say(f"the recording is incomplete: {'; '.join(recording.problems)}")


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide a recording's warnings, which are told afterwards, and do not matter after Ctrl-C."""
    from capture.errors import RecordingWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        yield
