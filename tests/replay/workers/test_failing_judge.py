"""A failing judge loses a row or a call, but the replay continues."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from replay.bench.settings import Settings
from replay.kernels.registry import find
from replay.workers.environments import Environment
from replay.workers.judge_process import JudgeProcess
from replay.workers.process import First, Process, first_processes
from replay.workers.shared_rounds import replay_in_workers
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload as synthetic_workload

OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"
ENDED = "the judge's process ended during this call, and was started again"


class Failing(JudgeProcess):
    """Judge that fails at a question, once; at "take block" because its process ends.

    Args:
        fails_at: the question, on `torch-math` if the question is on a kernel.
    """

    def __init__(self, process: Process, fails_at: str) -> None:
        super().__init__(process)
        self._fails_at = fails_at

    def answer(self, question: dict[str, Any], *others: Any) -> dict[str, Any]:
        if question["do"] == self._fails_at and question.get("kernel") in (None, "torch-math"):
            self._fails_at = ""
            if question["do"] != "take block":
                return {"failed": OUT_OF_MEMORY, "traceback": "of the judge"}
            self._process.close()
        return super().answer(question, *others)


@pytest.fixture(scope="module")
def first() -> Iterator[First]:
    """Processes shared by all tests; each test makes its own judge object and shared file."""
    with first_processes(60) as processes:
        yield processes


@pytest.mark.parametrize(
    ("fails_at", "statuses", "reason"),
    [
        ("open", ["error"], OUT_OF_MEMORY),
        ("judge", ["ok", "error"], OUT_OF_MEMORY),
        ("take block", ["ok", "error"], ENDED),
        ("judge block", ["ok", "error"], OUT_OF_MEMORY),
    ],
)
def test_failing_judge_costs_a_row_or_a_call_and_no_later_one(
    quick: Settings,
    first: First,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: str,
    statuses: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr("replay.bench.confirmation.TOO_FAST", 1e6)  # the machine may be busy
    judge = Failing(first.judge, fails_at)
    here = {"this": Environment("this", sys.executable, 60, worker=first.worker)}
    kernels = {"this": [find(name) for name in ("torch-default", "torch-math")]}
    spec = Spec(1, 2, 2, 16, 16, 8, 8)
    calls = [synthetic_workload(name, "random", spec, 0) for name in "ab"]
    rows, later = (list(replay_in_workers([call], kernels, quick, here, judge)) for call in calls)
    assert [row.status for row in rows] == statuses
    assert rows[-1].reason == f"cannot be judged: {reason}"
    assert [row.status for row in later] == ["ok", "ok"]
