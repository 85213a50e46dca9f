"""The `replay` command, which also writes the time of each report (`benchmarks.replay_overhead`).

python -m benchmarks.marked_replay FILE [arguments of replay]

Like the command, this program starts the workers before it imports PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from replay.api.session import Session
from replay.cli.main import main
from replay.rows.row import Row

if TYPE_CHECKING:
    from replay.distribution.pace import Pace
    from replay.workers.execution import Progress
    from replay.workloads.workload import Workload

_marks: list[tuple[float, str, str]] = []
"""Time, call and stage of each report; call and stage are empty at the end of the last row."""
_rows = Session.rows


def _marked(session: Session) -> Iterator[Row]:
    """Yield the rows of a session, and mark the time of each report."""
    from replay.bench.reported_stages import DONE
    from replay.report import progress

    shown_progress = progress.shown_progress

    @contextlib.contextmanager
    def marked(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
        with shown_progress(pace, quiet=quiet) as report:

            def mark(workload: Workload, stage: str, device: str = "") -> None:
                if stage != DONE:
                    _marks.append((time.perf_counter(), workload.name, stage))
                report(workload, stage, device)

            yield mark
        _marks.append((time.perf_counter(), "", ""))

    progress.shown_progress = marked
    return _rows(session)


if __name__ == "__main__":
    try:
        with mock.patch.object(Session, "rows", _marked):
            main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps(_marks))
