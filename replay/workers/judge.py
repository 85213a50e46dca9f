"""The parent's side of the process that judges outputs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from replay.bench.settings import Settings
from replay.workers.process import Process
from replay.workloads.recorded import Workload


class Judge:
    """A process that no kernel runs in, started when first asked."""

    def __init__(self, timeout: float) -> None:
        self.spool = tempfile.mkdtemp(prefix="attention-replay-")
        """Where workers put what is to be judged."""
        self._process = Process(sys.executable, timeout, "replay.workers.judge_server")
        self._starting: Future[None] | None = None

    def start(self) -> None:
        """Start the process, which imports PyTorch while the first worker does."""
        if self._starting is None:
            threads = ThreadPoolExecutor(max_workers=1)
            self._starting = threads.submit(self._process.start)
            threads.shutdown(wait=False)

    def answer(
        self, question: dict[str, Any], workload: Workload, settings: Settings
    ) -> dict[str, Any]:
        """What the judge says to a worker's question.

        Raises:
            CannotStart, Died: the process does not work.
        """
        self.start()
        assert self._starting is not None
        self._starting.result()
        if question["do"] == "open":
            question = {**question, "workload": workload.source}
        try:
            return self._process.answer(**question, settings=settings.to_json())
        finally:
            for path in Path(self.spool).iterdir():
                path.unlink()

    def close(self) -> None:
        """End the process."""
        if self._starting is not None:
            wait([self._starting])
        self._process.close()
        shutil.rmtree(self.spool, ignore_errors=True)
