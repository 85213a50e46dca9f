"""The parent accepts or rejects rows, depending on what its judge saw; the judge may fail."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from capture.call.block_mask import block_mask
from replay.accuracy.thresholds import Thresholds
from replay.bench.confirmation import LEAST_QUIET
from replay.bench.settings import Settings
from replay.isolation.block_inputs import BlockInputs
from replay.kernels.registry import find
from replay.rows.errors_of_output import AccuracyClass, GradientErrors, Gradients
from replay.rows.row import Row
from replay.workers import judge_worker
from replay.workers.environments import Environment
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.messages import line_of
from replay.workers.process import First, Placement, Process, first_processes
from replay.workers.remote_judge import RemoteJudge
from replay.workers.shared_file import SharedFile
from replay.workers.shared_memory import Outbox
from replay.workers.shared_rounds import replay_in_workers
from replay.workloads.random_calls import Spec
from replay.workloads.sources import Source
from replay.workloads.workload import random_workload as synthetic_workload
from tests.factories import accuracy, made_workload, row, settings

CPU = torch.device("cpu")
GRADIENTS = Gradients(*[GradientErrors(0.5, 0.01, 0.1)] * 3)
WORKLOAD = made_workload("call", lambda device: pytest.fail("not loaded here"))


class Scene:
    """Observations of one worker by the parent, with a scripted judge, clock and counters.

    Args:
        changes: settings.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.now, self.waited, self.used = 1.0, 0.0, 0.0
        self.null_s = self.copy_s = 0.0
        """Seconds that a block without a kernel takes, and the copy of its outputs."""
        self.status, self.wrong, self.other_share = "ok", "", ""
        self.shared_file = -1
        self.questions: list[dict[str, Any]] = []
        self.goes_on = False
        """True if the worker goes on although it was stopped."""
        worker = SimpleNamespace(pid=1, stop=lambda: None, ran_while_stopped=lambda: self.goes_on)
        judge = cast("JudgeProcess", self)
        asked = settings(**changes)
        self.evidence = CallEvidence(judge, WORKLOAD, asked, cast("Process", worker), {})
        module = "replay.workers.judge_process"
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(f"{module}.processes.waited_seconds", lambda pid: self.waited)
        monkeypatch.setattr(f"{module}.processes.processor_seconds", lambda pid, **_: self.used)
        monkeypatch.setattr(f"{module}.torch.get_num_threads", lambda: 2)

    def answer(self, question: dict[str, Any], *_: object) -> dict[str, Any]:
        self.questions.append(question)
        if question["do"] == "take block":
            self.now += self.copy_s
        finding = {"finding": [self.status, "a sentence"], "accuracy": asdict(accuracy())}
        answers: dict[str, dict[str, Any]] = {
            "judge": {"judged": finding},
            "judge gradients": {
                "judged": {"finding": finding["finding"], "errors": asdict(GRADIENTS)}
            },
            "take block": {"output_bytes": 1},
            "judge block": {"wrong": self.wrong, "other_share": self.other_share},
            "run null block": {"seconds": self.null_s},
        }
        return answers[question["do"]]

    def judge(self, kernel: str = "mine", accuracy_class: str = "exact", **others: Any) -> None:
        asked = {"do": "judge", "kernel": kernel, "accuracy_class": accuracy_class}
        self.evidence.answer({**asked, "of_core": False, **others})

    def block(
        self, call_ms: float, calls: int = 16, waited: float = 0.0, used: float = 0.0, **asked: Any
    ) -> dict[str, Any]:
        """Run a block; what its threads waited and used are shares of its time."""
        usual = {"kernel": "mine", "calls": calls, "accuracy_class": "exact", "wrong": ""}
        self.evidence.answer({"do": "begin block"})
        seconds = calls * call_ms / 1000
        self.now += seconds
        self.waited += waited * seconds
        self.used += used * seconds
        answer = self.evidence.answer({"do": "end block", **usual, **asked})
        while "examined" in answer:
            answer = self.evidence.answer({"do": "choose", "handed": {}})
        return answer

    def asked(self, do: str) -> list[dict[str, Any]]:
        return [each for each in self.questions if each["do"] == do]

    def confirmed(self, ms: float | None = 1.0, **fields: Any) -> Row:
        return self.evidence.confirmed(row(**{"ms": ms, "accuracy_class": "exact", **fields}))


Make = Callable[..., Scene]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Make:
    return partial(Scene, monkeypatch)


@pytest.mark.parametrize(
    ("statuses", "wrong"),
    [([], ""), (["ok"], "stale"), (["inaccurate"], ""), (["ok", "inaccurate"], "")],
)
def test_row_must_agree_with_its_judge(scene: Make, statuses: list[str], wrong: str) -> None:
    seen = scene()
    for seen.status in statuses:
        seen.judge()
    seen.wrong = wrong
    if statuses:
        seen.block(1.0)
    assert (
        seen.confirmed().reason == "its row says that its output is right, but the judge does not"
    )
    assert seen.confirmed(None, status="inaccurate", reason="wrong").reason == "wrong"
    again = scene()
    again.judge()
    again.block(1.0)
    assert again.confirmed().reason == ""
    again.evidence.wrong = seen.evidence.wrong
    assert (again.confirmed().status == "error") == bool(statuses)


def test_row_must_agree_with_the_judge_of_its_gradients(scene: Make) -> None:
    seen = scene(backward=True)
    seen.judge()
    seen.block(1.0)
    unjudged = "its row says that its gradients are right, but none were judged"
    assert seen.confirmed().reason == unjudged
    seen.judge(do="judge gradients")
    assert seen.confirmed(gradients=None).gradients == GRADIENTS
    seen.status = "inaccurate"
    seen.judge(do="judge gradients")
    assert seen.confirmed().status == "error"


def test_worker_that_goes_on_during_the_block_without_a_kernel_is_broken(scene: Make) -> None:
    """It could make that block longer, which is subtracted from its own."""
    seen = scene()
    seen.goes_on = True
    with pytest.raises(ValueError, match="while it was stopped"):
        seen.block(1.0)


def test_errors_and_times_are_those_that_the_judge_confirmed(scene: Make) -> None:
    seen = scene()
    seen.judge()
    untimed = seen.confirmed(None, status="not-timed", accuracy=replace(accuracy(), spoilt_rows=9))
    assert (untimed.status, untimed.accuracy) == ("not-timed", accuracy())
    rejected = seen.confirmed()
    assert rejected.reason == "its row has a time, but no block of calls confirmed it"
    assert (rejected.status, rejected.time_ms, rejected.accuracy) == ("error", None, None)
    seen.block(1.0)
    seen.status = "inaccurate"
    seen.judge(of_core=True)  # costs only the core's time
    assert seen.confirmed().status == "ok"
    assert "too few to confirm 0.1 ms" in seen.confirmed(0.1).reason
    for _ in range(LEAST_QUIET):
        seen.block(1.0)
    contradicted = seen.confirmed(0.5, process="mine.py")
    assert (contradicted.status, contradicted.time_ms) == ("error", None)
    assert contradicted.reason.startswith("its samples say 0.5 ms a call; ")


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
    scene: Make, tmp_path: Path, kernel: str, declared: list[str], judged_as: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def attention(): ...\nraise SystemExit('imported in the parent')")
    kernel, seen = kernel.replace("FILE", str(file)), scene()
    for each in declared:
        seen.judge(kernel, each)
        seen.block(1.0, kernel=kernel, accuracy_class=each)
    asked = {each["accuracy_class"] for each in seen.questions if "accuracy_class" in each}
    assert asked == {judged_as}
    assert seen.confirmed(kernel=kernel, accuracy_class=judged_as).status == "ok"
    other = "exact" if judged_as != "exact" else "quantised"
    told = f"its row says {other}, but its output was judged as {judged_as}"
    assert seen.confirmed(kernel=kernel, accuracy_class=other).reason == told


def test_block_without_a_kernel_is_subtracted_and_runs_once_a_size(scene: Make) -> None:
    seen = scene()
    seen.null_s, seen.copy_s = 0.004, 0.002
    found = [seen.block(1.0)["call_ms"] for _ in range(2)]
    assert found == pytest.approx([0.75, 0.75])  # 16 ms and a copy of 2 ms, without 4 and 2 ms
    seen.block(1.0, calls=32)
    assert len(seen.asked("run null block")) == 2
    seen.null_s = 9.0  # a call takes no longer than in a smaller block, a block than a larger one
    assert seen.block(1.0, calls=64)["call_ms"] == pytest.approx(0.875)
    assert seen.block(1.0, calls=8)["call_ms"] == pytest.approx(0.5)
    only = scene()
    only.null_s = 9.0
    assert only.block(1.0)["call_ms"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("waited", "used", "call_ms", "is_interrupted"),
    [(0.04, 0.0, 1.0, False), (0.5, 1.0, 1.0, True), (0.9, 4.0, 2.0, True)],
)
def test_block_counts_the_processor_time_of_all_threads(
    scene: Make, waited: float, used: float, call_ms: float, is_interrupted: bool
) -> None:
    """Waits are not subtracted, because a kernel can make its own threads wait."""
    seen = scene().block(1.0, waited=waited, used=used)
    assert (seen["call_ms"], seen["is_interrupted"]) == (pytest.approx(call_ms), is_interrupted)
    # A GPU's work goes on while the host waits.
    on_gpu = scene(device=torch.device("cuda")).block(1.0, waited=waited, used=used)
    assert on_gpu["call_ms"] == pytest.approx(1.0)


def test_rows_are_drawn_after_the_block_and_only_of_well_formed_outputs(scene: Make) -> None:
    seen = scene()
    assert len({seen.evidence.answer({"do": "begin block"})["seed"] for _ in range(2)}) == 2
    assert not seen.questions  # the judge learns nothing before the block
    seen.block(1.0)
    take, judge, *_ = seen.questions
    assert (take["do"], judge["do"]) == ("take block", "judge block")
    assert {"drawn", "seed"} & judge.keys() - take.keys() == {"drawn", "seed"}
    assert seen.block(1.0, wrong="no tensor")["wrong"] == "no tensor"
    assert len(seen.asked("judge block")) == 1


def test_sparse_kernel_sends_its_choice_of_every_examined_call(scene: Make) -> None:
    seen = scene()
    seen.judge("mine", "sparse")
    seen.block(1.0, calls=4, accuracy_class="sparse")
    assert sorted(each["number"] for each in seen.asked("judge block")) == [0, 1, 2, 3]
    fields: dict[str, Any] = {"ms": 5.0, "accuracy_class": "sparse", "process": "mine.py"}
    seen.other_share = "it chose others"
    seen.block(90.0, accuracy_class="sparse")
    row = seen.confirmed(**fields)
    assert (row.status, row.flags) == ("ok", ("unconfirmed: it chose others",))
    seen.evidence.answer({"do": "begin block"})
    asked = {"kernel": "mine", "calls": 4, "accuracy_class": "sparse", "wrong": ""}
    seen.evidence.answer({"do": "end block", **asked})  # and it sends no choice
    assert seen.confirmed(**fields).status == "error"


CALL = synthetic_workload("call", "random", Spec(1, 2, 2, 16, 90, 32, 32, dtype=torch.float32), 0)


class Here:
    """Judge process that runs inside the test process."""

    def __init__(self, shared_file: int) -> None:
        self.shared_file = shared_file

    def answer(self, question: dict[str, Any], _: object, settings: Settings) -> dict[str, Any]:
        answers: list[str] = []
        request = {**question, "workload": CALL.source.to_json(), "settings": settings.to_json()}
        request["file"] = self.shared_file

        def say(**answer: Any) -> None:
            answers.append(line_of(answer))

        judge_worker.handle(request, say, dict)
        return cast("dict[str, Any]", json.loads(answers.pop()))


@pytest.fixture
def court() -> Iterator[Callable[..., RemoteJudge]]:
    """`court(…)` returns a worker's judge, whose parent and judge are inside the test process."""
    shared = SharedFile()

    def begin(settings: Settings) -> RemoteJudge:
        answers: list[dict[str, Any]] = []
        worker = SimpleNamespace(pid=None, stop=lambda: None, ran_while_stopped=lambda: False)
        judge = cast("JudgeProcess", Here(shared.descriptor))
        evidence = CallEvidence(judge, CALL, settings, cast("Process", worker), {})

        def say(*, judge: dict[str, Any]) -> None:
            answers.append(evidence.answer(json.loads(json.dumps(judge))))

        factory = RemoteJudge.factory(say, answers.pop, Outbox(shared.descriptor, CPU))
        opened = factory(CALL.load(settings.device), settings, None)
        assert isinstance(opened, RemoteJudge)
        return opened

    yield begin
    judge_worker._inbox.cache_clear()  # the next file may have the same descriptor


Court = Callable[..., RemoteJudge]


def test_chosen_keys_are_used_only_for_sparse_kernels(court: Court) -> None:
    judge, call = court(settings()), CALL.load(CPU)
    few = (torch.arange(90) < 9).expand(16, 90)
    on_few = scaled_dot_product_attention(call.query, call.key, call.value, few)
    assert judge.judge("exact", "exact", on_few, few).finding.status == "inaccurate"
    assert judge.judge("sparse", "sparse", on_few, few).finding.status == "ok"
    tiles = torch.tensor([True, False]).expand(1, 1, 4, 2)
    blocks = block_mask(tiles, 4, 45)
    on_blocks = scaled_dot_product_attention(call.query, call.key[:, :, :45], call.value[:, :, :45])
    judged = judge.judge("blocks", "sparse", on_blocks, blocks)
    assert (judged.finding.status, judged.kept) == ("ok", 0.5)


def test_judge_of_gradients_is_not_a_judge_of_outputs_alone(court: Court) -> None:
    call = CALL.load(CPU)
    court(settings())
    zeros = {name: torch.zeros_like(getattr(call, name)) for name in ("query", "key", "value")}
    found = court(settings(backward=True)).judge_gradients("mine", "exact", zeros)
    assert found.finding.status == "inaccurate"
    assert found.errors is not None
    assert found.errors.key.relative_l1 == 1


def test_expected_call_is_loaded_once(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def source_from_json(source: dict[str, Any]) -> Source:
        loaded.append(source["name"])
        return CALL.source

    monkeypatch.setattr(judge_worker, "source_from_json", source_from_json)
    monkeypatch.setattr(judge_worker, "_judges", {})
    for _ in range(2):  # the worker dies and restarts
        assert Here(-1).answer({"do": "expect"}, None, settings()) == {"expecting": True}
        output = scaled_dot_product_attention(**CALL.load(CPU).arguments())
        assert court(settings()).judge("mine", "exact", output, None).finding.status == "ok"
    assert loaded == ["call"]


def test_failure_of_an_expected_call_is_no_answer_to_the_next_question() -> None:
    failing = iter([{"expecting": True}, {"failed": "no such file"}])
    process = SimpleNamespace(
        place=Placement(), ask=lambda **_: failing, answer=lambda **_: {"unread": [*failing]}
    )
    judge = JudgeProcess(cast("Process", process))
    judge.expect(CALL, settings())
    assert judge.answer({"do": "open"}, CALL, settings()) == {"unread": []}


def off(output: Tensor, by: float) -> Tensor:
    """Add errors of random sign, as a share of each row's mean value."""
    signs = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).sign()
    return output + by * output.abs().mean(-1, keepdim=True) * signs


@pytest.mark.parametrize(
    ("kernel", "error", "loosened"),
    [
        ("exact", 1e-3, {"exact": {"rounding_factor": 1e4}}),
        ("sparse", 1e-3, {"sparse": {"same_dtype_factor": 1e6}}),
        ("quantised", 0.8, {"quantised": {"maximum_relative_l1": 0.9}}),
    ],
)
def test_blocks_are_judged_by_the_users_tolerances(
    court: Court, kernel: AccuracyClass, error: float, loosened: dict[str, dict[str, float]]
) -> None:
    call = CALL.load(CPU)
    chosen = torch.ones(16, 90, dtype=torch.bool) if kernel == "sparse" else None

    def judged(by: float, thresholds: Thresholds, late: int = 0) -> str:
        judge = court(settings(tolerances=thresholds))
        judge.judge(kernel, kernel, scaled_dot_product_attention(**call.arguments()), chosen)
        seed, outputs = judge.begin_block(kernel, 8)
        inputs = BlockInputs(call)
        inputs.draw(seed, 8)
        for number, kept in enumerate(outputs):
            inputs.apply(max(number - late, 0), outputs[number - 1] if number else None)
            kept.copy_(off(scaled_dot_product_attention(**call.arguments()), by))
        choose = None if chosen is None else lambda number: chosen
        return judge.end_block(kernel, "", inputs.restore, choose).wrong

    assert "exceeds" in judged(error, Thresholds())
    assert judged(error, Thresholds.from_tables(loosened)) == ""
    assert judged(0.0, Thresholds()) == ""
    assert judged(0.0, Thresholds(), late=1)


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"
ENDED = "the judge's process ended during this call, and was started again"


class Failing(JudgeProcess):
    """Judge that fails at a question, once; at "take block" because its process ends."""

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
    "fails_at", ["open", "judge", "judge gradients", "take block", "judge block"]
)
def test_failing_judge_costs_a_row_or_a_call_and_no_later_one(
    quick: Settings, first: First, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    monkeypatch.setattr("replay.bench.confirmation.TOO_FAST", 1e6)  # the machine may be busy
    judge = Failing(first.judge, fails_at)
    here = {"this": Environment("this", sys.executable, 60, worker=first.worker)}
    kernels = {"this": [find(name) for name in ("torch-default", "torch-math")]}
    calls = [synthetic_workload(name, "random", Spec(1, 2, 2, 16, 16, 8, 8), 0) for name in "ab"]
    asked = replace(quick, backward=True)
    rows, later = (list(replay_in_workers([call], kernels, asked, here, judge)) for call in calls)
    assert [row.status for row in rows] == ["ok", "error"][fails_at == "open" :]
    reason = ENDED if fails_at == "take block" else OUT_OF_MEMORY
    assert rows[-1].reason == f"cannot be judged: {reason}"
    assert [row.status for row in later] == ["ok", "ok"]
    assert all(row.gradients and row.backward_ms and row.both_ms for row in later)
    assert later[1].both_speedup is not None
