"""A failing judge loses a row or a call, but the replay continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replay.bench.settings import Settings
from replay.kernels.registry import find
from replay.rows.row import Row
from replay.workers.environments import Environment
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.process import First, Process, first_processes
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload as synthetic_workload

FAILED = {"failed": "OutOfMemoryError: CUDA out of memory", "traceback": "of the judge"}


class Failing(JudgeProcess):
    """Judge that fails at some questions."""

    def __init__(self, process: Process, fails: Callable[[dict[str, Any]], bool]) -> None:
        super().__init__(process)
        self._fails = fails

    def answer(self, question: dict[str, Any], *others: Any) -> dict[str, Any]:
        return FAILED if self._fails(question) else super().answer(question, *others)


class Ending(JudgeProcess):
    """Judge whose process ends on the first call, before it judges a kernel's timed samples."""

    has_ended = False

    def answer(self, question: dict[str, Any], *others: Any) -> dict[str, Any]:
        wanted = (question["do"], question.get("kernel")) == ("samples", "torch-math")
        if wanted and not self.has_ended:
            self.has_ended = True
            self._process.close()
        return super().answer(question, *others)


@pytest.fixture(scope="module")
def first() -> Iterator[First]:
    """Processes shared by all tests; each test makes its own judge object and shared file."""
    with first_processes(60) as processes:
        yield processes


Rows = Callable[..., list[list[Row]]]


@pytest.fixture
def rows_by(quick: Settings, first: First, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """`rows_by(Failing, fails)` returns the rows of two calls, judged by `Failing(…, fails)`."""
    for allowed in ("BESIDE_SAMPLE_MS", "LATENCY_MS"):  # a busy machine must not fail the test
        monkeypatch.setattr(f"replay.workers.judge_process.{allowed}", 1e6)

    def run(judge_class: type[JudgeProcess], *arguments: Any) -> list[list[Row]]:
        judge = judge_class(first.judge, *arguments)
        environment = Environment("this", sys.executable, 60, judge=judge, worker=first.worker)
        kernels = [find(name) for name in ("torch-default", "torch-math")]
        calls = [
            synthetic_workload(name, "random", Spec(1, 2, 2, 16, 16, 8, 8), 0) for name in "ab"
        ]
        return [environment.replay(call, kernels, quick, lambda stage: None) for call in calls]

    return run


@pytest.mark.parametrize("at", ["judge", "samples"])
def test_output_that_cannot_be_judged_costs_its_row(rows_by: Rows, at: str) -> None:
    found = rows_by(Failing, lambda asked: (asked["do"], asked.get("kernel")) == (at, "torch-math"))
    said = "cannot be judged: OutOfMemoryError: CUDA out of memory"
    for rows in found:
        assert [row.status for row in rows] == ["ok", "error"]
        assert rows[1].reason == said


def test_speed_up_is_withheld_over_a_rejected_baseline(
    rows_by: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = "torch-default"
    monkeypatch.setattr(
        CallEvidence, "why_rejected", lambda self, row: "planted" if row.kernel == baseline else ""
    )
    for rows in rows_by(JudgeProcess):
        assert (rows[0].status, rows[0].reason) == ("error", "planted")
        assert (rows[1].status, rows[1].speedup) == ("ok", None)
        assert rows[1].flags[-1] == f"no speed-up: the row of {baseline} was rejected"


def test_call_whose_reference_cannot_be_computed_costs_its_rows(rows_by: Rows) -> None:
    opened = iter([True, False])
    first, second = rows_by(Failing, lambda asked: asked["do"] == "open" and next(opened))
    said = "cannot be judged: OutOfMemoryError: CUDA out of memory"
    assert [(row.kernel, row.status, row.reason) for row in first] == [("", "error", said)]
    assert [row.status for row in second] == ["ok", "ok"]


def test_judge_that_ends_during_a_call_costs_no_later_one(rows_by: Rows) -> None:
    first, second = rows_by(Ending)
    assert [row.status for row in first + second] == ["ok", "error", "ok", "ok"]
    assert first[1].reason == (
        "cannot be judged: the judge's process ended, and another was started amid this call"
    )
