"""The `replay` command, which also writes when it reported what (`benchmarks.replay_overhead`).

python -m benchmarks.marked_replay FILE [arguments of replay]

Like the command itself it starts the workers before it imports PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from replay.cli import main as command

_marks: list[tuple[float, str, str]] = []
"""Time, call and stage of each report; neither for the end of the last row."""
_replay = command._replay


def _marked(*arguments: Any) -> Any:
    """Run the command once its workers start, and mark its progress too."""
    from replay.bench.runner import DONE
    from replay.cli import progress

    shown_progress = progress.shown_progress

    @contextlib.contextmanager
    def marked(pace: progress.Pace, *, quiet: bool) -> Iterator[Callable[[Any, str], None]]:
        with shown_progress(pace, quiet=quiet) as report:

            def mark(workload: Any, stage: str) -> None:
                if stage != DONE:
                    _marks.append((time.perf_counter(), workload.name, stage))
                report(workload, stage)

            yield mark
        _marks.append((time.perf_counter(), "", ""))

    progress.shown_progress = marked
    return _replay(*arguments)


if __name__ == "__main__":
    try:
        with mock.patch.object(command, "_replay", _marked):
            command.main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps(_marks))
