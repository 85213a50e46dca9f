"""Sketches of live models, and plans that a tuning makes with one."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import attention_replay as ar
from replay.api.foretell_model import pictures
from replay.api.tuning_planner import _foretold
from replay.api.verify_model import _foretell
from replay.end_to_end.model_check import ModelResult
from replay.plan.cells import Cell
from replay.plan.key_lengths import KeyLengths
from replay.plan.step_ranges import StepRange
from replay.sketches.sketch import ErrorSketch, Place
from tests.factories import normal

INT8 = f"{Path(__file__).parents[3] / 'benchmarks' / 'emulated_8_bit.py'}:int8"


class Layer(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states + scaled_dot_product_attention(states, states, states)


def run_of(model: nn.Module) -> Any:
    def run(prompt: int) -> Tensor:
        with torch.no_grad():
            output: Tensor = model(normal(1, 2, 24, 8, seed=prompt))
            return output

    return run


def test_a_live_model_is_foretold(tmp_path: Path) -> None:
    model = nn.Sequential(Layer(), Layer())
    path = tmp_path / "sketch"
    sketch = ar.foretell(
        model, run_of(model), prompts=[1, 2, 3, 4], kernels=INT8, out=path, name="two"
    )
    assert [place.module for place in ErrorSketch.load(path).places] == ["0", "1"]
    assert sketch.runs == 4 * (1 + 8)
    run = run_of(model)
    measured = []
    for prompt in (5, 6, 7):
        own = run(prompt)
        with ar.use_kernel(INT8):
            measured.append(float((run(prompt) - own).norm() / own.norm()))
    error = sketch.foretell(lambda *place: INT8).error
    assert error == pytest.approx(math.prod(measured) ** (1 / 3), rel=0.35)


def test_the_models_own_attention_is_not_foretold() -> None:
    with pytest.raises(ar.Error, match="no kernel to foretell"):
        ar.foretell(Layer(), run_of(Layer()), prompts=[1, 2], kernels="torch-default")


def test_pictures_are_found_in_a_result() -> None:
    image = torch.rand(1, 3, 16, 16)
    found = pictures(SimpleNamespace(images=image))
    assert found is not None
    assert torch.equal(found, image)
    assert pictures(object()) is None


def sketch_of(model: str) -> ErrorSketch:
    places = [Place("a", "denoise", 64, step) for step in range(4)]
    scores = torch.tensor([[[0.1], [0.2], [0.3], [0.4]]])
    return ErrorSketch(model, "relative_l2", ["fast"], places, [0], scores, scores[0], 40)


def test_checks_of_the_sketched_model_are_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [ModelResult(name, "toy", "") for name in ("fast", "unknown")]
    work: Any = SimpleNamespace(capture=SimpleNamespace(model="toy"), plans={})
    _foretell(sketch_of("other"), checks, work)
    assert "the sketch is of other, so no drift of toy is foretold" in capsys.readouterr().err
    _foretell(sketch_of("toy"), checks, work)
    assert checks[0].foretold is not None
    assert checks[0].foretold.error == pytest.approx(math.sqrt((1 + 0.3) / 2))
    assert checks[1].foretold is None


def test_energies_of_a_tuning_add_up_to_the_foretold_error() -> None:
    sketch = sketch_of("toy")

    def cell(steps: StepRange | None, module: str = "a") -> Any:
        lengths = KeyLengths(64, 64)
        own: Any = None  # rows and calls do not matter
        return Cell("toy", "", module, "denoise", "own", [], own, [], {}, lengths, steps)

    # The whole has (1² + 0.3)/2; the last two steps have 25/30 of the squares.
    assert _foretold(sketch, cell(None), "fast") == pytest.approx(0.65)
    assert _foretold(sketch, cell(StepRange(2, 3)), "fast") == pytest.approx(0.65 * 25 / 30)
    assert _foretold(sketch, cell(None), "own") == 0
    assert math.isnan(_foretold(sketch, cell(None, "decoder"), "fast"))
    assert math.isnan(_foretold(sketch, cell(None), "slow"))
