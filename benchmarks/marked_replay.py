"""The `replay` command, which also writes when it reported what (`benchmarks.replay_overhead`).

python -m benchmarks.marked_replay FILE [arguments of replay]
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replay.bench.runner import DONE
from replay.cli import progress
from replay.cli.main import main

_marks: list[tuple[float, str, str]] = []
"""Time, call and stage of each report; neither for the end of the last row."""
_shown_progress = progress.shown_progress


@contextlib.contextmanager
def marked(pace: progress.Pace, *, quiet: bool) -> Iterator[Callable[[Any, str], None]]:
    """In place of the command's progress."""
    with _shown_progress(pace, quiet=quiet) as report:

        def mark(workload: Any, stage: str) -> None:
            if stage != DONE:
                _marks.append((time.perf_counter(), workload.name, stage))
            report(workload, stage)

        yield mark
    _marks.append((time.perf_counter(), "", ""))


if __name__ == "__main__":
    progress.shown_progress = marked
    try:
        main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps(_marks))
