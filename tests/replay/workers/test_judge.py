"""What the parent believes of a worker's rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from replay.bench.referee import Sample
from replay.bench.settings import Settings
from replay.bench.variation import Walk
from replay.workers import judge, judge_server
from replay.workers.judge import Hearing, Judge
from replay.workers.remote_referee import RemoteReferee
from replay.workloads.random_calls import Spec
from replay.workloads.random_calls import workload as synthetic_workload
from replay.workloads.recorded import Workload
from tests.factories import row, settings


class Pretended:
    """A judge with the answers it was given."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)

    def answer(self, *_: object) -> dict[str, Any]:
        return self.answers.pop(0)


def judged(status: str) -> dict[str, Any]:
    return {"judged": {"finding": [status, "a sentence"]}}


def hearing_of(*answers: dict[str, Any]) -> Hearing:
    workload = Workload("call", lambda device: pytest.fail("not loaded here"))
    hearing = Hearing(cast("Judge", Pretended(*answers)), workload, settings())
    for answer in answers:
        do = "samples" if "wrong" in answer else "judge"
        hearing.answer({"do": do, "kernel": "mine", "of_core": False})
    return hearing


@pytest.mark.parametrize(
    ("answers", "believed"),
    [
        ([], False),
        ([judged("ok")], True),
        ([judged("ok"), {"wrong": ""}], True),
        ([judged("ok"), {"wrong": "stale"}], False),
        ([judged("inaccurate")], False),
        ([judged("ok"), judged("inaccurate")], False),
    ],
)
def test_a_row_is_as_right_as_its_judge_says(answers: list[dict[str, Any]], believed: bool) -> None:
    hearing = hearing_of(*answers)
    assert (hearing.objection(row("mine", ms=1.0)) == "") == believed
    assert hearing.objection(row("mine", status="inaccurate")) == ""


def test_a_wrong_core_costs_no_more_than_its_time() -> None:
    hearing = hearing_of(judged("ok"))
    hearing.judge = cast("Judge", Pretended(judged("inaccurate")))
    hearing.answer({"do": "judge", "kernel": "mine", "of_core": True})
    assert hearing.objection(row("mine", ms=1.0)) == ""


@pytest.mark.parametrize(
    ("here", "there", "believed"),
    [(100.0, 100.0, True), (115.0, 50.0, True), (1000.0, 100.0, False)],
)
def test_a_worker_whose_clock_is_slow_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, here: float, there: float, believed: bool
) -> None:
    clock = iter([5.0, 5.0 + here / 1000])
    monkeypatch.setattr(judge.time, "perf_counter", lambda: next(clock))
    hearing = hearing_of(judged("ok"))
    hearing.answer({"do": "start clock", "kernel": "mine"})
    hearing.answer({"do": "stop clock", "kernel": "mine", "calls": 10, "block_ms": there})
    assert (hearing.objection(row("mine", ms=1.0)) == "") == believed


CALL = synthetic_workload("call", "random", Spec(1, 2, 2, 16, 90, 32, 32, dtype=torch.float32), 0)


@pytest.fixture
def court(tmp_path: Path) -> Callable[..., RemoteReferee]:
    """A worker's referee that asks the judge's process, all in this one."""

    def begin(settings: Settings, seed: int = 5) -> RemoteReferee:
        answers: list[dict[str, Any]] = []

        def say(*, judge: dict[str, Any]) -> None:
            request = {**judge, "workload": CALL.source, "settings": settings.to_json()}
            judge_server.handle(request, lambda **answer: answers.append(answer), answers.pop)

        factory = RemoteReferee.factory(say, answers.pop, str(tmp_path))
        referee = factory(CALL.load(settings.device), seed, settings, None)
        assert isinstance(referee, RemoteReferee)
        return referee

    return begin


Court = Callable[..., RemoteReferee]


def test_samples_of_an_energy_block_are_judged_by_its_steps(court: Court) -> None:
    referee, call = court(settings()), CALL.load(torch.device("cpu"))
    walk, samples = Walk(call, seed=5), []
    for _ in range(30):
        walk.step()
        output = scaled_dot_product_attention(**call.arguments())
        rows = walk.changed.of(output), walk.others.of(output)
        samples.append(Sample(walk.number, *rows, of_walk=True))
    assert referee.judge_samples("mine", "exact", samples, None) == ""
    stale = samples[-1]._replace(number=walk.number - 10)
    assert "exceeds" in referee.judge_samples("mine", "exact", [*samples[:3], stale], None)
