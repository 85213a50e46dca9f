"""Tuning of block-sparse attention, with an emulated kernel whose time is that of its blocks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import attention_replay as ar
from benchmarks import emulated_block_sparse
from benchmarks.emulated_block_sparse import EMULATED
from benchmarks.trained_runs import trained_runs
from capture.storage.dataset import Dataset
from replay.api import tuning_stages
from replay.api.tune_model import live_runnable, tune_runnable
from replay.api.tuning_sparsity import check_device
from replay.end_to_end import drift
from replay.report.tuning import used_kernels
from replay.sparsity.examined_calls import Examination
from replay.sparsity.kernel import SparseKernel
from replay.sparsity.settings import shares_of
from replay.tune.recorded_calls import chosen_steps
from replay.tune.tuning import Tuning
from tests.replay.api.test_tune_model import Layer, without_times
from tests.replay.tune.test_steps import census

LIMIT = 0.03
"""Largest relative L1 error of the output."""


class Denoiser(nn.Module):
    """Two layers of attention, and one whose queries are fewer than a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.short = Layer()

    def forward(self, hidden_states: Tensor, timestep: int) -> Tensor:
        for layer in self.layers:
            # Head 0 attends to few keys, and head 1 to all of them.
            hidden_states = layer(hidden_states)
        return hidden_states + self.short(hidden_states[:, :4]).mean()


@pytest.fixture(autouse=True)
def always_worth_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    without_times(monkeypatch)
    monkeypatch.setattr(tuning_stages, "LEAST_SAVED", -math.inf)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Denoiser:
    for name in ("ROWS", "KEYS"):
        monkeypatch.setattr(emulated_block_sparse, name, 8)
    torch.manual_seed(0)
    made = Denoiser().eval()
    for layer in made.layers:
        assert isinstance(layer, Layer)
        layer.inward.weight.data[:16] *= 12.0  # the query of head 0
    return made


def tune(runnable: Any, quality: str, out: Path, **options: Any) -> Tuning:
    options = {"kernels": "torch-default", "sparse": EMULATED, "rounds": 1, **options}
    return tune_runnable(runnable, quality, out=out, **options)


def test_tuned_plan_has_a_share_for_each_head(model: Denoiser, tmp_path: Path) -> None:
    start = torch.randn(1, 64, 32)

    def run() -> Tensor:
        states = start
        for step in range(4):
            states = states + 0.1 * model(states, step)
        return states

    out = tmp_path / "plan.json"
    tuning = tune(live_runnable(model, run, None), f"relative_l1={LIMIT}", out, quiet=True)
    plan = tuning.plan
    assert plan is not None
    assert tuning.quality is not None
    assert LIMIT / 10 < tuning.quality.worst <= LIMIT
    sparse = [each for each in plan.choices if each.kernel != "torch-default"]
    assert {each.module for each in sparse} == {"layers.0", "layers.1"}
    shares = [shares_of(each.kernel, 2)[1] for each in sparse]
    assert any(head != other for head, other in shares)
    assert "emulated-block-sparse[" in used_kernels(plan)
    # The stored plan runs, and has the drift that the tuning measured.
    assert ar.Plan.load(out) == plan
    with torch.no_grad():
        baseline = {"output": run()}
        with ar.use_plan(out, model):
            found = drift.compare(baseline, {"output": run()})["relative_l1"]
    assert found == pytest.approx(tuning.quality.worst)
    examined = Examination.load(tmp_path / "plan.json.tuning" / "sparsity.json")
    assert len(examined.calls) == 8
    assert set(examined.left_out.values()) == {"is shorter than 8 queries or 32 keys"}
    examined.save(tmp_path / "copy.json")
    assert Examination.load(tmp_path / "copy.json") == examined


def test_tuning_says_which_calls_it_had_no_time_to_examine(
    model: Denoiser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tuning_stages, "LEAST_SAVED", 1e-6)
    runnable = live_runnable(model, lambda: model(torch.ones(1, 64, 32), 0), None)
    late = replace(EMULATED, pace=Mock(side_effect=TimeoutError))
    tuning = tune(runnable, "relative_l1=1", tmp_path / "plan.json", sparse=late)
    said = "2 of 3 calls not examined for sparse attention"
    assert f"undecided: time ran out with {said}, and without these" in str(tuning)
    err = capsys.readouterr().err
    assert "replay: examining 3 calls for sparse attention" in err
    assert said in err
    assert "no sparse attention at 1 layer (is shorter than" in err


@pytest.mark.slow
def test_trained_flux_is_tuned_within_a_budget(tmp_path: Path) -> None:
    runnable, _ = trained_runs("flux", 1, steps=1)
    result = tune(runnable, "psnr=30", tmp_path / "plan.json", quiet=True)
    assert result.plan is not None
    assert result.quality is not None
    assert result.quality.worst >= 30
    calls = sum(each.calls * (each.baseline_ms or 0.0) for each in result.plan.choices)
    assert result.plan.saved_ms > 0.3 * calls
    settings = Dataset.open(str(tmp_path / "plan.json.tuning" / "recording")).captures[0].settings
    assert settings["steps"] == 1


def test_a_layer_has_fewer_recorded_steps_in_a_large_model() -> None:
    layers = [(f"blocks.{number}", "denoise", 0, 49) for number in range(30)]
    counts = census(*layers, ("text", "encode", 0, 0))
    assert chosen_steps(counts, 10**9, most=60) == [12, 37]
    assert chosen_steps(counts, 10**9, most=20) == [24]
    assert len(chosen_steps(census(*layers[:3]), 10**9, most=60)) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_sparse_attention_needs_a_device_that_has_the_kernel() -> None:
    with pytest.raises(ar.Error, match=r"sparse attention cannot run here \(triton-block-sparse"):
        check_device(SparseKernel(), {"": nn.Linear(2, 2)})
