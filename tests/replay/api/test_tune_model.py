"""Tuning of a live model: the quality of its plan, prompts kept for acceptance, and resumption."""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import attention_replay as ar
import models
from replay.api import tuned_model, tuning_stages
from replay.api.choices import RunPlace
from replay.api.session import Session
from replay.api.tune_model import tune_runnable
from replay.cli.main import main
from replay.end_to_end import drift, model_check
from replay.rows.row import Speedup, SpeedupOver, SpeedVerdict
from replay.timing.statistics import summarize
from replay.tune import compared_calls
from replay.tune.directory import TuningDirectory
from tests.in_this_process import refusal, runner

INT8 = f"{Path(__file__).parents[3] / 'benchmarks' / 'emulated_8_bit.py'}:int8"
KERNELS = f"torch-flash,{INT8}"
SECONDS = {"torch-default": 10.0, "torch-flash": 8.0, INT8: 1.0}
"""Invented times of a call, because the emulated kernel is slow and a test's machine is busy."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(32, 96)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.inward(states).view(1, -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value)
        return states + attended.transpose(1, 2).reshape(states.shape)


@pytest.fixture(scope="module")
def model() -> Iterator[nn.Module]:
    """Yield a model, in a process with fewer threads than other processes begin with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield nn.Sequential(*(Layer() for _ in range(4))).eval()
    torch.set_num_threads(threads)


def start(outlier: float = 1.0) -> Tensor:
    """Return states with one channel that is larger, which makes 8 bits less accurate."""
    states = torch.randn(1, 48, 32, generator=torch.Generator().manual_seed(1))
    states[..., 3] *= outlier
    return states


def tune(model: nn.Module, run: Callable[..., Any], limit: float, out: Path, **options: Any) -> Any:
    options = {"kernels": KERNELS, **options}
    budget = f"relative_l1={limit!r}"
    return ar.tune(model, run, budget, out=out, rounds=1, progress=False, **options)


def with_times(tuning: Path, seconds: Mapping[str, float] = SECONDS) -> Path:
    """Replace the times in a tuning's rows, and add a kernel whose code the user did not name."""
    path = tuning / "rows.jsonl"
    rows = [
        replace(row, time_ms=summarize([1000 * seconds[row.kernel]] * 6), speedup=None, flags=())
        for row in ar.Rows.read(path)
        if row.kernel in seconds
    ]
    fast = summarize([1.0] * 6)
    others = [
        replace(row, kernel="other.py:kernel", time_ms=fast) for row in rows if row.kernel == INT8
    ]
    ar.Rows([*rows, *others]).write(path)
    return tuning


@pytest.fixture(scope="module")
def compared(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tuning whose kernels are compared."""
    out = tmp_path_factory.mktemp("tuning") / "plan.json"
    tune(model, lambda: model(start()), 1.0, out)
    return with_times(out.with_name("plan.json.tuning"))


def without_times(patch: pytest.MonkeyPatch) -> None:
    """Let plans be fast whatever the machine's load; no times need rounds or new processes."""
    fast = Speedup(1.2, 1.1, 1.3, "fast", "interval-above-1")
    patch.setattr(model_check, "paired_speedup", lambda *times: fast)
    patch.setattr(model_check, "affordable_rounds", lambda seconds: 2)
    patch.setattr(tuning_stages, "RunPlace", partial(RunPlace, in_process=True))


@pytest.fixture
def out(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a plan whose kernels are compared, and fast in the model."""
    shutil.copytree(compared, tmp_path / "plan.json.tuning")
    without_times(monkeypatch)
    return tmp_path / "plan.json"


def figure(model: nn.Module, plan: Any, run: Callable[[], Tensor]) -> float:
    """Return the relative L1 error of a run with a plan."""
    with torch.no_grad():
        baseline = {"output": run()}
        with ar.use_plan(plan, model, trust_code=True):
            return drift.compare(baseline, {"output": run()})["relative_l1"] or 0.0


def test_tuned_plan_is_the_fastest_within_the_budget(model: nn.Module, out: Path) -> None:
    def run() -> Tensor:
        return model(start())

    fastest = tune(model, run, 1.0, out)
    assert "1.20× (1.10-1.30) at relative L1" in str(fastest)
    assert f", judged on the run it was tuned on: {INT8} in 4 of 4 layers; " in str(fastest)
    assert fastest.checks[1].predicted("run").swap_seconds  # what swapping costs was measured
    limit = fastest.quality.worst / 2
    careful = tune(model, run, limit, out)
    assert INT8 in careful.plan.kernels
    assert 0 < careful.quality.worst <= limit
    assert figure(model, out, run) == pytest.approx(careful.quality.worst)
    # No plan is judged again, and no call is recorded or replayed again.
    files = ["trials.jsonl", "rows.jsonl", "recording/manifest.json"]
    before = [(out.parent / "plan.json.tuning" / name).read_bytes() for name in files]
    assert tune(model, run, limit, out).plan.choices == careful.plan.choices
    assert before == [(out.parent / "plan.json.tuning" / name).read_bytes() for name in files]


@pytest.mark.slow
def test_plan_holds_on_prompts_that_the_search_did_not_see(
    model: nn.Module, out: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def run(outlier: float) -> Tensor:
        return model(start(outlier)[:, : 24 if outlier > 1 else 48])

    prompts = [1.0, 1.0, 9.0]  # the last one is kept for acceptance
    limit = 1.01 * tune(model, lambda: run(1.0), 1.0, out).quality.worst
    (out.parent / "plan.json.tuning" / "settings.json").unlink()
    tuning = tune(model, run, limit, out, prompts=prompts)
    assert not any("plan was not made" in str(each.message) for each in recwarn)
    searched = [figure(model, tuning.plan, partial(run, prompt)) for prompt in prompts]
    assert searched[2] == pytest.approx(tuning.quality.worst)
    assert max(searched) <= limit
    assert ", judged on 1 prompt kept for acceptance (24 keys not timed): " in str(tuning)


@pytest.mark.slow
def test_stored_plan_is_reused_until_a_condition_changes(
    model: nn.Module, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, compared = out.parent / "store", out.with_name("plan.json.tuning")

    def tune_compared(*given: Any, out: Path, **options: Any) -> Any:
        shutil.copytree(compared, f"{out}.tuning")
        return tune_runnable(*given, out=out, **{**options, "quiet": True})

    monkeypatch.setattr(tuned_model, "tune_runnable", tune_compared)

    def applied(quality: str = "relative_l1=1") -> tuple[Any, str]:
        """Return a plan that ran once, and what stderr says."""
        capsys.readouterr()
        options = {"kernels": KERNELS, "directory": store, "rounds": 1}
        run = torch.no_grad()(lambda: model(start()))
        with ar.tuned(model, run, quality, **options) as plan:
            run()
            assert plan.swap.hits == (4 if plan.plan else 0)
            assert ("its own attention" in str(plan)) == (plan.plan is None)
        return plan.plan, capsys.readouterr().err

    tuned, said = applied()
    assert "no plan for Sequential is stored in" in said
    assert tuned.measured.speedup.ratio == 1.2
    assert applied() == (tuned, "")
    (path,) = store.iterdir()
    path.write_text(path.read_text().replace(f'"{torch.__version__}"', '"2.0"'))
    assert f"plan is not reused: torch 2.0 → {torch.__version__}; tuning again" in applied()[1]
    with_times(compared, dict.fromkeys(SECONDS, 1.0))
    kept = applied("relative_l1=0.9")
    assert kept[0] is None
    assert "quality budget relative_l1=1 → relative_l1=0.9; tuning again" in kept[1]
    assert "cheapest kernel at every layer saves 0.0%" in kept[1]
    shutil.rmtree(compared)  # the verdict is stored
    assert "cheapest kernel at every layer saves 0.0%" in applied("relative_l1=0.9")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("slow", "no plan is faster: the best one within relative_l1=1 measures 1.20×"),
        ("inconclusive", "undecided, because the machine is busy: the best plan within"),
    ],
)
def test_plan_that_is_not_faster_is_not_returned(
    model: nn.Module,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: SpeedVerdict,
    sentence: str,
) -> None:
    found = Speedup(1.2, 0.9, 1.3, verdict, "interval-includes-1")
    monkeypatch.setattr(model_check, "paired_speedup", lambda *times: found)
    tuning = tune(model, lambda: model(start()), 1.0, out)
    assert sentence in str(tuning)
    assert tuning.plan is None
    assert not out.exists()
    assert tuning.is_undecided == (verdict == "inconclusive")


def test_call_that_a_busy_machine_hid_is_measured_again(model: nn.Module, out: Path) -> None:
    rows = with_times(out.with_name("plan.json.tuning"), dict.fromkeys(SECONDS, 1.0)) / "rows.jsonl"
    first, *others = ar.Rows.read(rows)
    hidden = SpeedupOver(1.0, None, None, "inconclusive", "interrupted", "torch-default")
    ar.Rows([replace(first, speedup=hidden), *others]).write(rows)
    tune(model, lambda: model(start()), 1.0, out)
    again = {row.call.name: row for row in ar.Rows.read(rows) if row.kernel == first.kernel}
    assert len(again) == 4
    assert [name for name in again if again[name].time_ms != first.time_ms] == [first.call.name]


@pytest.mark.parametrize("stands_for_others", [True, False])
def test_calls_that_there_was_no_time_for_are_planned_like_the_nearest(
    model: nn.Module, out: Path, monkeypatch: pytest.MonkeyPatch, stands_for_others: bool
) -> None:
    outcome_of, left_out = Session.outcome, "3 of 4 calls left out"

    def outcome(session: Session) -> Any:
        found = outcome_of(session)
        rows = [row for row in found.rows if row.call.name == found.rows[0].call.name]
        return replace(found, rows=rows, left_out=left_out)

    monkeypatch.setattr(Session, "outcome", outcome)
    if not stands_for_others:
        monkeypatch.setattr(compared_calls, "with_nearest", lambda rows, entries: rows)
        with_times(out.with_name("plan.json.tuning"), dict.fromkeys(SECONDS, 1.0))
    tuning = tune(model, lambda: model(start()), 1.0, out)
    said = f"undecided: time ran out with {left_out}, and without these"
    assert (f"{INT8} in 4 of 4 layers" if stands_for_others else said) in str(tuning)
    assert tuning.is_undecided != stands_for_others


@pytest.mark.slow
def test_interrupted_search_goes_on(model: nn.Module, out: Path) -> None:
    runs = 0

    def run() -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 6:  # two of the baseline, one that counts calls, and two plans
            raise KeyboardInterrupt
        return model(start())

    with pytest.raises(KeyboardInterrupt):
        tune(model, run, 1e-5, out)
    trials = out.parent / "plan.json.tuning" / "trials.jsonl"
    before = trials.read_text()
    assert before.count("\n") == 2
    tune(model, run, 1e-5, out)
    assert trials.read_text().startswith(before)
    plans = [json.dumps(json.loads(line)["plan"]) for line in trials.read_text().splitlines()]
    assert len(plans) == len({*plans})


COUNTER = itertools.count(1)


def test_model_that_a_run_changes_is_refused(model: nn.Module, out: Path) -> None:
    runs = itertools.count()

    def run() -> Tensor:
        # The model changes after the two runs of the baseline and the one that counts calls.
        return model(start()) * (1.0 if next(runs) < 3 else 1.5)

    with pytest.raises(ar.Error, match="let it leave the model as it was"):
        tune(model, run, 0.4, out)


@pytest.mark.parametrize(
    ("returned", "options", "sentence"),
    [
        (lambda: torch.rand(2, 3), {}, "already differ by more than relative_l1=0.1"),
        (lambda: object(), {}, "returned an object of type object, which cannot be judged"),
        (lambda: "a text", {}, "relative_l1 cannot be computed from sequences (1, 6): choose top1"),
        (lambda: 1 / 0, {}, "run() failed under torch.no_grad(), before any kernel was swapped in"),
        (lambda prompt: None, {}, "run() cannot be called (missing a required argument: 'prompt'"),
        (lambda: None, {"prompts": ["one", "two"]}, "run(prompt) cannot be called (too many"),
        (lambda: torch.full((2, 3), math.nan), {}, "own attention gives NaN in output"),
        (lambda: torch.rand(1, 3).to_sparse(), {}, "returned a sparse tensor, which"),
        (lambda: {"a": torch.ones(2) * 1j}, {}, "returned a complex tensor, which"),
        (lambda: Layer()(torch.ones(1, 2, 32)) * 0, {}, "give the model that makes the calls"),
        (lambda: torch.ones(next(COUNTER)), {}, "returned {'output': (1,)} and {'output': (2,)}"),
        (lambda: None, {"prompts": "ab"}, "prompts must be a list of prompts, not one text"),
        (lambda: torch.ones(1), {"kernels": "3"}, "no kernel '3'"),
        (lambda: torch.ones(1), {"kernels": 3}, "must be a text or a list of names, got int"),
        (lambda: torch.ones(1), {"prompts": 3}, "prompts must be a list of prompts, got int"),
        (3, {}, "run must be a function that runs the model, got int"),
    ],
)
@pytest.mark.filterwarnings("ignore:recording")
def test_run_that_cannot_be_judged_is_refused(
    model: nn.Module,
    tmp_path: Path,
    returned: Callable[[], Any],
    options: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises((ar.Error, TypeError), match=re.escape(sentence)):
        tune(model, returned, 0.1, tmp_path / "plan.json", **options)
    assert not [*tmp_path.iterdir()]


USER_MODEL = """
import torch

def build():
    model = torch.nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 4)) * 0 - 1
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "--model is required"),
        ("--model X --out -", "--out needs a file"),
        ("--model X --quality lpips=1", "unknown quality metric 'lpips'"),
        (
            "--model model.py:build",
            "values from -1 to -1: choose cosine or relative_l1, or let run",
        ),
        ("--model model.py:build --quality cosine=0.9", "made no attention call"),
        ("--model X --prompts none.txt", "cannot read --prompts none.txt: No such file"),
        ("--model X --prompts blank.txt", "blank.txt is empty: write at least two prompts, one a"),
        ("--model X --prompts one.txt", "prompts must be at least two, because half of them"),
        ("--model X --prompts two.txt --prompt a", "--prompt and --prompts exclude each other"),
        ("--model model.py:build --prompts two.txt", "build reads no prompts: leave them out, or"),
        ("--model model.py:build --text two.txt", "build is not a language model that can score"),
    ],
)
def test_command_refuses_what_it_cannot_tune(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(USER_MODEL)
    for name, text in (("blank", "\n"), ("one", "a\n\n"), ("two", "a\nb\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    err = refusal(runner(main, capsys), "tune", "-q", *arguments.split())
    assert sentence in err


def test_recording_that_does_not_fit_is_refused_first(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four layers have query, key, value and output of 48 tokens with 32 floats.
    needed = 4 * 4 * 48 * 32 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(ar.Error, match=r"needs about 98.3 kB for 4 calls in .*make room"):
        tune(model, lambda: model(start()), 1.0, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json.tuning" / "recording").exists()


@pytest.mark.parametrize("name", ["seed", "kernels"])
def test_directory_serves_one_tuning_at_a_time(model: nn.Module, tmp_path: Path, name: str) -> None:
    settings = {"model": "mine", "seed": 1, "kernels": None}
    files = TuningDirectory(tmp_path / "plan.json.tuning", {**settings, name: 0})
    runnable = models.Runnable(
        name="mine",
        roots={"": model},
        run=lambda: model(start()),
        outputs=lambda result: result,
        weights="trained",
        settings={"seed": 1},
    )
    with files.held(), pytest.raises(ar.Error, match="another tuning is using"):
        tune_runnable(runnable, "relative_l1=0.1", out=tmp_path / "plan.json")
    with pytest.raises(ar.Error, match=f"a tuning with {name} 0, not {settings[name]}"):
        tune_runnable(runnable, "relative_l1=0.1", out=tmp_path / "plan.json")
    files.checks.symlink_to("/dev/full")
    full = pytest.raises(ar.Error, match=r"No space left on device: make room.*tune again to go on")
    with full, files.opened(files.checks, "w") as file:
        file.write("one check")
