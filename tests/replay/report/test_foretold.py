"""Paragraph on where a plan loses quality, in hand-computed numbers."""

from dataclasses import replace

import pytest
import torch

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.plan.step_ranges import StepRange
from replay.report.foretold import print_foretold, quality_paragraph
from replay.report.model_tables import print_checks
from replay.sketches.sketch import ErrorSketch, Place
from replay.sketches.worst_places import foretold_drift
from replay.timing.statistics import summarize
from tests.printed import printed

PLACES = [Place(f"blocks.{layer}", "denoise", 64, step) for step in (0, 1) for layer in (0, 1)]
SCORES = [0.03, 0.04, 0.02, 0.01]
"""One direction, so that the squared error is half of (Σ s)² plus half of Σ s²."""


def sketch() -> ErrorSketch:
    scores = torch.tensor(SCORES)[None, :, None]
    local = torch.ones(4, 1)
    return ErrorSketch("toy", "relative_l2", ["fast"], PLACES, [0], scores, local, 40, 15.0)


def plan() -> Plan:
    """Return a plan that runs the kernel everywhere and saves 8 ms a layer."""
    choices = [
        LayerChoice(
            *(f"blocks.{layer}", "denoise", "fast", True, True, None, 1.0, 5.0, 8.0, 2, 2),
            steps=StepRange(0, 1),
        )
        for layer in (0, 1)
    ]
    return Plan("toy", "", Budget("cosine", -1.0), "torch-default", choices)


def test_the_worst_places_are_named_with_cost_and_gain() -> None:
    found = foretold_drift(sketch(), plan())
    # Half of 0.1² and half of 0.003; without the first three places 0.01² remains.
    assert found.error == pytest.approx(0.0065**0.5)
    assert found.worst == ["blocks.1, step 0", "blocks.0, step 0", "blocks.0, step 1"]
    assert found.error_without == pytest.approx(0.01)
    # Each choice covers two places and saves 8 ms.
    assert found.costs_ms == pytest.approx(12.0)
    # Shares: s (0.1 + s)/2 over 0.0065 is 0.0039/2, 0.0056/2, 0.0024/2 and 0.0011/2.
    assert quality_paragraph("plan.json", found) == (
        "plan.json, quality: the sketch foretells PSNR 36.9 dB (± 3.8 dB). Layers that carry most "
        "of the squared error: blocks.1 52 %, blocks.0 48 %. By step, from the first: 0: 73 %, "
        "1: 27 %. Keeping the worst 3 places exact (blocks.1, step 0; blocks.0, step 0; "
        "blocks.0, step 1) costs 12 ms of a run and leaves PSNR 55.0 dB."
    )


def test_shares_by_place_are_those_of_the_layers_and_steps() -> None:
    found = foretold_drift(sketch(), plan())
    assert found.columns == ["0", "1"]
    assert found.by_place == {"blocks.0": [0.3, 0.185], "blocks.1": [0.431, 0.0846]}
    own = foretold_drift(sketch(), lambda module, *_: "fast" if module == "blocks.0" else "")
    assert own.by_place["blocks.1"] == [0.0, 0.0]
    assert foretold_drift(sketch(), lambda *place: "").by_place == {}


def test_error_of_a_text_encoder_belongs_to_no_denoising_step() -> None:
    encoder = Place("encoder", "encode", 8, 0)
    scores = torch.tensor([0.05, *SCORES])[None, :, None]
    made = replace(sketch(), places=[encoder, *PLACES], scores=scores, local=torch.ones(5, 1))
    found = foretold_drift(made, lambda *place: "fast")
    # s (0.15 + s)/2 adds up to 0.0065 in step 0, 0.0025 in step 1, and 0.014 with the encoder.
    assert found.by_step == pytest.approx({"0": 65 / 140, "1": 25 / 140})


def test_phases_are_the_columns_of_a_language_model() -> None:
    own = Place("embedder", "encode", 8, 0)  # runs in no other phase
    phases = [("prefill", 8, 0), ("decode", 9, 1), ("decode", 10, 2)]
    places = [Place(f"layers.{layer}", *each) for each in phases for layer in (0, 1)]
    scores = torch.tensor([0.0, 0.03, 0.04, 0.02, 0.01, 0.0, 0.0])[None, :, None]
    made = replace(sketch(), places=[own, *places], scores=scores, local=torch.ones(7, 1))
    found = foretold_drift(made, lambda *place: "fast")
    assert found.columns == ["encode", "prefill", "decode"]
    assert found.by_place == {
        "embedder": [0.0, None, None],
        "layers.0": [None, 0.3, 0.185],
        "layers.1": [None, 0.431, 0.0846],
    }


def test_the_foretold_drift_stands_beside_the_measured_one() -> None:
    own, other = (ModelResult(name, "toy", "trained") for name in ("the model's own", "plan.json"))
    other = replace(other, drift={"relative_l1": 0.05, "cosine": 0.99, "nan_count": 0})
    other.foretold = foretold_drift(sketch(), plan())
    own.measured["run"] = MeasuredSpan(summarize([100.0] * 5), None, None, 0.1)
    text = printed(print_checks, [own, other], width=100)
    assert "foretold: PSNR 36.9 dB" in text


def test_kernels_are_listed_as_if_they_ran_everywhere() -> None:
    text = printed(print_foretold, sketch(), width=100)
    assert "toy · 4 places · foretold from 1 prompt, 40 passes" in text
    assert "PSNR 36.9 dB" in text
