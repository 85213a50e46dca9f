"""Model of this process, which a check runs like a model in a child process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from replay.end_to_end.model_process import ModelRefused, ModelRuns, RunFailed
from replay.end_to_end.model_server import step
from replay.end_to_end.run_pace import RunPace

T = TypeVar("T")


class LiveModel(ModelRuns):
    """Model that the user built in this process.

    A kernel that crashes ends this process, so run only kernels that a replay ran before.

    Args:
        runnable: the model and its run (`models.Runnable`).
        pace: receives each stage, and the time of each run.
    """

    def __init__(self, runnable: Any, pace: RunPace) -> None:
        super().__init__(pace)
        self._runnable = runnable
        self.builds, self.is_built = 1, True

    def close(self) -> None:
        """Leave the model to its owner."""

    def build(self) -> None:
        """Do nothing, because the model exists."""

    def _step(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        answer: dict[str, Any] = {}

        def say(**message: Any) -> None:
            if "at" in message:
                self._report_at(message["at"])
            # A run is read from JSON, as from a child process.
            answer.update(json.loads(json.dumps(message)))

        step(self._runnable, request, say)
        if "refused" in answer:
            raise ModelRefused(answer["refused"])
        if "lost" in answer:
            raise RunFailed(answer["status"], answer["lost"])
        if "failed_run" in answer:
            raise RunFailed(**answer["failed_run"])
        return read(answer)
