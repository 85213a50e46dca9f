"""The parent process accepts or rejects rows, depending on what its judge saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replay.accuracy.thresholds import Thresholds
from replay.bench.settings import Settings
from replay.isolation.input_perturbation import InputPerturbation, SteppedPerturbation
from replay.isolation.judge import Sample
from replay.rows.errors_of_output import AccuracyClass
from replay.timing import timer
from replay.timing.statistics import summarize
from replay.workers import judge_process as judge
from replay.workers import judge_worker
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.process import Process
from replay.workers.remote_judge import RemoteJudge
from replay.workers.shared_memory import Outbox, SharedFile
from replay.workers.worker import Say, line_of
from replay.workloads.random_calls import Spec
from replay.workloads.sources import Source
from replay.workloads.workload import random_workload as synthetic_workload
from tests.factories import made_workload, row, settings

CPU = torch.device("cpu")


class Pretended:
    """Judge with scripted answers."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.questions: list[dict[str, Any]] = []

    def answer(self, question: dict[str, Any], *_: object) -> dict[str, Any]:
        self.questions.append(question)
        return self.answers.pop(0)


def judged(status: str) -> dict[str, Any]:
    return {"judged": {"finding": [status, "a sentence"]}}


def hearing_of(*answers: dict[str, Any]) -> CallEvidence:
    workload = made_workload("call", lambda device: pytest.fail("not loaded here"))
    evidence = CallEvidence(cast("JudgeProcess", Pretended(*answers)), workload, settings())
    for answer in answers:
        do = "samples" if "wrong" in answer else "judge"
        question = {"do": do, "kernel": "mine", "of_core": False, "accuracy_class": "exact"}
        evidence.answer(question | {"numbers": []})
    return with_samples(evidence) if answers else evidence


def with_samples(
    evidence: CallEvidence, kernel: str = "mine", timed: int = 8, walked: int = 0
) -> CallEvidence:
    """Record that the judge accepted timed samples of a kernel, and samples of its energy block."""
    before, evidence.judge = evidence.judge, cast("JudgeProcess", Pretended({"wrong": ""}))
    numbers = [(n, n, n >= timed) for n in range(timed + walked)]
    evidence.answer({"do": "samples", "kernel": kernel, "numbers": numbers})
    evidence.judge = before
    return evidence


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
def test_row_must_agree_with_its_judge(answers: list[dict[str, Any]], believed: bool) -> None:
    evidence = hearing_of(*answers)
    assert (evidence.why_rejected(row("mine", ms=1.0, accuracy_class="exact")) == "") == believed
    assert evidence.why_rejected(row("mine", status="inaccurate")) == ""


def test_wrong_core_costs_only_its_time() -> None:
    evidence = hearing_of(judged("ok"))
    evidence.judge = cast("JudgeProcess", Pretended(judged("inaccurate")))
    evidence.answer({"do": "judge", "kernel": "mine", "of_core": True})
    assert evidence.why_rejected(row("mine", ms=1.0, accuracy_class="exact")) == ""


@pytest.mark.parametrize(
    ("kernel", "declared", "judged_as"),
    [
        # The class comes from the parent's registry, also for a variant.
        ("torch-math", ["quantised", "sparse"], "exact"),
        ("triton-sparse-decode[keep=0.1]", ["exact"], "sparse"),
        # Files are not imported here, so the first reported class counts.
        ("FILE:attention", ["quantised", "exact"], "quantised"),
        ("of-another-environment", ["quantised", "sparse"], "quantised"),
    ],
)
def test_worker_cannot_choose_the_accuracy_class(
    tmp_path: Path, kernel: str, declared: list[str], judged_as: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('imported in the parent')")
    kernel = kernel.replace("FILE", str(file))
    pretended = Pretended(*[judged("ok")] * len(declared))
    workload = made_workload("call", lambda device: pytest.fail("not loaded here"))
    evidence = CallEvidence(cast("JudgeProcess", pretended), workload, settings())
    for each in declared:
        question = {"do": "judge", "kernel": kernel, "of_core": False, "accuracy_class": each}
        evidence.answer(question)
    with_samples(evidence, kernel)
    assert {question["accuracy_class"] for question in pretended.questions} == {judged_as}
    assert evidence.why_rejected(row(kernel, ms=1.0, accuracy_class=judged_as)) == ""
    other = "exact" if judged_as != "exact" else "quantised"
    told = f"its row says that it is {other}, and it was judged as {judged_as}"
    assert evidence.why_rejected(row(kernel, ms=1.0, accuracy_class=other)) == told


@pytest.mark.parametrize(
    ("here", "there", "believed"),
    [(100.0, 100.0, True), (104.0, 50.0, True), (106.0, 50.0, False), (1000.0, 100.0, False)],
)
def test_row_of_a_slow_clock_is_rejected(
    monkeypatch: pytest.MonkeyPatch, here: float, there: float, believed: bool
) -> None:
    clock = iter([5.0, 5.0 + here / 1000])
    monkeypatch.setattr(judge.time, "perf_counter", lambda: next(clock))
    evidence = hearing_of(judged("ok"))
    evidence.answer({"do": "start clock", "kernel": "mine"})
    evidence.answer({"do": "stop clock", "kernel": "mine", "calls": 10, "block_ms": there})
    assert (evidence.why_rejected(row("mine", ms=1.0, accuracy_class="exact")) == "") == believed


@pytest.mark.parametrize(
    ("timed", "walked", "rounds", "believed"),
    [(8, 0, 30, True), (6, 0, 6, True), (7, 0, 30, False), (0, 8, 30, False), (5, 4, 6, False)],
)
def test_row_without_enough_judged_samples_is_rejected(
    timed: int, walked: int, rounds: int, believed: bool
) -> None:
    """Judged samples of an energy block do not replace judged timed samples."""
    workload = made_workload("call", lambda device: pytest.fail("not loaded here"))
    evidence = CallEvidence(cast("JudgeProcess", Pretended(judged("ok"))), workload, settings())
    question = {"do": "judge", "kernel": "mine", "of_core": False, "accuracy_class": "exact"}
    evidence.answer(question)
    with_samples(evidence, timed=timed, walked=walked)
    found = evidence.why_rejected(row("mine", ms=[1.0] * rounds, accuracy_class="exact"))
    wanted = f"the judge got {timed} of {min(8, rounds)} timed samples: something changed the timer"
    assert found == ("" if believed else wanted)


@pytest.mark.parametrize(
    ("reported", "taken", "believed"),
    [
        (10.0, [12.0] * 10, True),
        (10.0, [900.0] * 7 + [12.0] * 3, True),
        (10.0, [900.0] * 8 + [12.0] * 2, False),
        (10.0, [80.0] * 10, True),
        (10.0, [100.0] * 10, False),
        (100.0, [340.0] * 10, True),
        (100.0, [380.0] * 10, False),
        (0.01, [250.0] * 10, True),
        (0.5, [200.0] * 10, False),
        (10.0, [900.0] * 8, True),
    ],
    ids=str,
)
def test_row_with_too_short_a_time_is_rejected(
    monkeypatch: pytest.MonkeyPatch, reported: float, taken: list[float], believed: bool
) -> None:
    """Times are checked only on a CPU, and only if the judge heard of every sample."""
    evidence, now = hearing_of(judged("ok")), 0.0
    monkeypatch.setattr(timer, "MINIMUM_CPU_SAMPLE_MS", 1.0)  # less in these tests
    monkeypatch.setattr(judge.time, "perf_counter", lambda: now)
    evidence.hear("mine")  # the check of the output
    now += 99.0
    evidence.hear("preparing to time")
    for ms in (5000.0, *taken):  # the first is the warm-up
        evidence.hear("mine")
        now += ms / 1000
        evidence.hear("another")
        now += 0.5
    evidence.hear("")
    times = [reported] * 10
    found = evidence.why_rejected(row("mine", ms=times, accuracy_class="exact"))
    assert (found == "") == believed, found
    assert believed or "something changed the timer" in found
    with_core = row("mine", ms=times, accuracy_class="exact", core_time_ms=summarize(times))
    assert evidence.why_rejected(with_core) == ""  # with a core, samples cannot be told apart
    evidence.settings = replace(evidence.settings, device=torch.device("cuda"))
    assert evidence.why_rejected(row("mine", ms=times, accuracy_class="exact")) == ""


@pytest.mark.parametrize(("agree", "blocks"), [([True], 1), ([False, True], 2), ([False] * 9, 5)])
def test_clocks_are_compared_again_before_a_row_is_rejected(agree: list[bool], blocks: int) -> None:
    """On a busy machine, a message may take longer than a block of calls."""
    asked: list[str] = []
    answers = iter(agree)

    def hear() -> dict[str, Any]:
        return {"agree": next(answers)} if asked[-1] == "stop clock" else {}

    judge = RemoteJudge(lambda *, judge: asked.append(judge["do"]), hear, Outbox("", CPU))
    assert judge.clock("mine", lambda: torch.ones(1), CPU, 0.1) is None
    assert asked == ["start clock", "stop clock"] * blocks


@pytest.mark.parametrize(("agree", "calls"), [([True], 1), ([False, True], 1 + 2)])
def test_only_call_of_a_block_is_judged(agree: list[bool], calls: int) -> None:
    """If two clocks disagree about a block, the next block has twice as many calls."""
    answers = iter([answer for each in agree for answer in ({}, {"agree": each})])
    outputs: list[Tensor] = []

    def run() -> Tensor:
        outputs.append(torch.ones(1))
        return outputs[-1]

    judge = RemoteJudge(lambda *, judge: None, lambda: next(answers), Outbox("", CPU))
    output = judge.clock("mine", run, CPU, 100.0)
    assert len(outputs) == calls
    assert (output is outputs[0]) == (calls == 1)


CALL = synthetic_workload("call", "random", Spec(1, 2, 2, 16, 90, 32, 32, dtype=torch.float32), 0)


def into(answers: list[dict[str, Any]]) -> Say:
    """Return a function that appends the messages for the parent to `answers`."""
    return lambda **answer: answers.append(json.loads(line_of(answer)))


@pytest.fixture
def court() -> Iterator[Callable[..., RemoteJudge]]:
    """`court(…)` returns a worker's judge whose judge process runs inside the test process."""
    shared = SharedFile()

    def begin(settings: Settings, seed: int = 5) -> RemoteJudge:
        answers: list[dict[str, Any]] = []

        def say(*, judge: dict[str, Any]) -> None:
            request = {**judge, "workload": CALL.source.to_json(), "settings": settings.to_json()}
            judge_worker.handle(request, into(answers), answers.pop)

        factory = RemoteJudge.factory(say, answers.pop, Outbox(shared.path, CPU))
        judge = factory(CALL.load(settings.device), seed, settings, None)
        assert isinstance(judge, RemoteJudge)
        return judge

    yield begin
    shared.close()
    judge_worker._inbox.cache_clear()  # the next file may have the same descriptor


Court = Callable[..., RemoteJudge]


def test_samples_of_an_energy_block_are_judged_by_its_steps(court: Court) -> None:
    judge, call = court(settings()), CALL.load(CPU)
    walk, samples = SteppedPerturbation(call, seed=5), []
    for _ in range(30):
        walk.step()
        output = scaled_dot_product_attention(**call.arguments())
        rows = (each.of(output) for each in walk.rows(walk.number))
        samples.append(Sample(walk.number, walk.number, *rows, is_stepped=True))
    assert judge.judge_samples("mine", "exact", samples, None) == ""
    stale = samples[-1]._replace(number=walk.number - 10)
    assert "exceeds" in judge.judge_samples("mine", "exact", [*samples[:3], stale], None)


def test_chosen_keys_are_used_only_for_sparse_kernels(court: Court) -> None:
    judge, call = court(settings()), CALL.load(CPU)
    few = (torch.arange(90) < 9).expand(16, 90)
    on_few = scaled_dot_product_attention(call.query, call.key, call.value, few)
    found = {
        each: judge.judge(each, each, on_few, few).finding.status for each in ("exact", "sparse")
    }
    assert found == {"exact": "inaccurate", "sparse": "ok"}


def test_expected_call_is_loaded_once(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def source_from_json(source: dict[str, Any]) -> Source:
        loaded.append(source["name"])
        return CALL.source

    monkeypatch.setattr(judge_worker, "source_from_json", source_from_json)
    monkeypatch.setattr(judge_worker, "_judges", {})
    request = {"do": "expect", "workload": CALL.source.to_json(), "settings": settings().to_json()}
    answers: list[dict[str, Any]] = []
    for _ in range(2):  # the worker dies and restarts
        judge_worker.handle(request, into(answers), answers.pop)
        assert answers.pop() == {"expecting": True}
        output = scaled_dot_product_attention(**CALL.load(CPU).arguments())
        assert court(settings()).judge("mine", "exact", output, None).finding.status == "ok"
    assert loaded == ["call"]


def test_failure_of_an_expected_call_is_reported_when_it_is_opened() -> None:
    """Answers to the failed call are not mistaken for answers to later questions."""

    class Answering:
        """A process that reports a failure for an expected call."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        def ask(self, *, do: str, **_: object) -> Iterator[dict[str, Any]]:
            yield {"expecting": True}
            self.asked.append(f"{do}: failed")
            yield {"failed": "no such file"}

        def answer(self, *, do: str, **_: object) -> dict[str, Any]:
            self.asked.append(do)
            return {"opened": True}

        def close(self) -> None: ...

    process = Answering()
    judge = JudgeProcess(cast("Process", process))
    judge.expect(CALL, settings())
    assert process.asked == []
    assert judge.answer({"do": "open"}, CALL, settings()) == {"opened": True}
    assert process.asked == ["expect: failed", "open"]
    judge.close()


def off(output: Tensor, by: float) -> Tensor:
    """Add errors of random sign, as a share of the output's largest value."""
    signs = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).sign()
    return output + by * output.abs().max() * signs


@pytest.mark.parametrize(
    ("kernel", "error", "loosened"),
    [
        ("exact", 1e-3, {"exact": {"same_dtype_factor": 1e4}}),
        ("exact", 1e-3, {"exact": {"rounding_factor": 1e4}}),
        ("sparse", 1e-3, {"sparse": {"same_dtype_factor": 1e4}}),
        ("quantised", 0.2, {"quantised": {"maximum_relative_l1": 0.5}}),
    ],
)
def test_timed_samples_are_judged_by_the_users_tolerances(
    court: Court, kernel: AccuracyClass, error: float, loosened: dict[str, dict[str, float]]
) -> None:
    call, tolerances = CALL.load(CPU), Thresholds.from_tables(loosened)
    chosen = torch.ones(16, 90, dtype=torch.bool) if kernel == "sparse" else None
    perturbation = InputPerturbation(call, 5, 0, values_only=chosen is not None)
    perturbation.apply()
    output = scaled_dot_product_attention(**call.arguments())

    def judged(by: float, thresholds: Thresholds) -> str:
        rows = (off(each.of(output), by) for each in perturbation.rows(3))
        judge = court(settings(tolerances=thresholds))
        return judge.judge_samples(kernel, kernel, [Sample(0, 3, *rows)], chosen)

    assert "exceeds" in judged(error, Thresholds())
    assert judged(error, tolerances) == ""
    assert judged(0.0, Thresholds()) == ""
