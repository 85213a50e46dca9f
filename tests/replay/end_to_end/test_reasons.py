"""Each reason, in a case where it applies and in a case where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, Calls, Clues, Estimate, Missing, PredictedTime
from replay.end_to_end.prediction import Prediction
from replay.end_to_end.reasons import reasons
from replay.timing.statistics import summarize
from tests.factories import speedup


def made(
    measured: float = 0.9, saved: float = 0.2, attention: float = 0.2, **span: Any
) -> ModelResult:
    """Return a check in which 0.2 of 1 s should be saved, attention takes 0.4 s, and 0.9 s is
    measured."""
    new = 1 - saved
    interval = Estimate(1 / new, 0.99 / new, 1.01 / new)
    predicted = PredictedTime(
        phase=RUN,
        forwards=1,
        old_seconds=Estimate(1.0, 1.0, 1.0),
        new_seconds=Estimate(new, new, new),
        speedup=interval,
        old_tokens_per_second=None,
        new_tokens_per_second=None,
        attention_seconds=0.4,
        attention_share=0.4,
        waiting_share=0.0,
        saved_seconds=saved,
        swapped_seconds=0.4,
        calls=Calls(swapped=20, fell_back=2),
    )
    predicted = replace(predicted, **span)
    checked = ModelResult("fast", "model", "none")
    checked.prediction = Prediction(predicted, {})
    ratio = 1 / measured
    checked.measured = {
        RUN: MeasuredSpan(
            summarize([1000 * measured] * 3), speedup(ratio, 0.99 * ratio, 1.01 * ratio), None
        )
    }
    checked.fallbacks = {"takes no mask": 2}
    checked.attention_seconds = {RUN: attention}
    checked.own_attention_seconds = {RUN: 0.4}
    return checked


def test_a_prediction_that_holds_needs_no_reason() -> None:
    checked = made(measured=0.8)
    checked.fallbacks = {"takes no mask": 9}
    assert reasons(checked) == []
    near = made(measured=0.81)
    assert near.measured[RUN].speedup is not None
    assert reasons(near) == []


def test_missing_predictions_and_measurements_have_no_reasons() -> None:
    checked = made(new_seconds=None, speedup=None)
    assert reasons(checked) == []
    checked = made()
    checked.prediction = None
    assert reasons(checked) == []
    checked = made()
    checked.measured = {}
    assert reasons(checked) == []


def test_unknown_cause_is_stated() -> None:
    checked = made()
    checked.attention_seconds = {}
    assert reasons(checked) == ["nothing recorded explains the difference"]


def test_more_fallbacks_than_predicted() -> None:
    checked = made()
    checked.fallbacks = {"head_dim 72": 1, "takes no mask": 5}
    assert "4 more calls fell back than predicted, mostly because: takes no mask" in reasons(
        checked
    )
    assert not any("fell back" in each for each in reasons(made()))


def test_calls_that_were_not_recorded() -> None:
    missing = [Missing("a", "encode", 3), Missing("b", "encode", 4), Missing("c", "denoise", 1)]
    found = reasons(made(not_recorded=missing))
    assert any(
        each.startswith("8 calls (encode, denoise) are unlike any replayed") for each in found
    )
    assert not any("unlike any replayed" in each for each in reasons(made()))


def test_a_gpu_that_waits_for_the_host() -> None:
    clues = Clues(more_layer_launch_seconds=0.003)
    found = reasons(made(waiting_share=0.6, clues=clues))
    assert (
        "the GPU waits for the host 60 % of the time, and according to the replay, layers "
        "take +3 ms more to launch: the model does not gain what attention saves there" in found
    )
    assert not any("waits" in each for each in reasons(made(clues=clues)))
    checked = made(waiting_share=0.6, clues=clues)
    checked.more_launch_seconds = {RUN: 0.002, "decode": 0.001}
    assert any("(attention calls alone +2 ms in the model)" in each for each in reasons(checked))


def test_attention_costs_something_else_in_the_model() -> None:
    found = reasons(made(attention=0.3))
    assert found == [
        "attention went from 400 ms to 300 ms in the model, and from 400 ms to 200 ms in the replay"
    ]


def test_the_rest_of_the_model_costs_something_else() -> None:
    (found,) = reasons(made(attention=0.2))
    assert found == (
        "attention is not the cause: it changed by -200 ms in the model and by -200 ms in the "
        "replay; the rest of the model took 600 ms with its own attention and 700 ms with "
        "the kernel"
    )


@pytest.mark.parametrize(("scatter", "is_told"), [(24.0, True), (1.4, False), (None, False)])
def test_a_busy_machine(scatter: float | None, is_told: bool) -> None:
    found = reasons(made(clues=Clues(scatter=scatter)))
    assert any("differ up to 24-fold" in each for each in found) == is_told
    assert any("the machine had other load" in each for each in found) == is_told


@pytest.mark.parametrize(("slowest", "is_told"), [(1.3, True), (1.1, False)])
def test_runs_that_differ(slowest: float, is_told: bool) -> None:
    checked = made()
    times = summarize([900.0, 900.0, 900.0 * slowest])
    checked.measured[RUN] = replace(checked.measured[RUN], ms=times)
    found = [
        each for each in reasons(checked) if each.startswith("the model took 900 ms to 1.12 s")
    ]
    assert bool(found) == is_told
    assert any("--model-rounds" in each for each in reasons(checked)) == is_told


def test_layout_copies() -> None:
    checked = made()
    checked.copies, checked.hits = 7, 20
    copied = "7 of 20 outputs were copied into the layout that the model expects"
    assert copied in reasons(checked)
    assert copied not in reasons(made())


@pytest.mark.parametrize(("in_model", "is_told"), [(1500.0, True), (1890.0, False), (None, False)])
def test_clocks(in_model: float | None, is_told: bool) -> None:
    checked = made(clues=Clues(sm_clock_mhz=1900.0, power_w=500.0))
    checked.sm_clock_mhz, checked.power_w = in_model, 690.0
    sentence = "the SM clock was 1900 MHz in the replay and 1500 in the model (500 and 690 W)"
    assert (sentence in reasons(checked)) == is_told
    assert any("SM clock" in each for each in reasons(checked)) == is_told


def test_sentences_of_one_phase_do_not_speak_of_the_whole_run() -> None:
    checked = made()
    assert checked.prediction is not None
    span = replace(checked.prediction.run, phase="denoise")
    checked.prediction = replace(checked.prediction, phases={"denoise": span})
    checked.measured["denoise"] = checked.measured[RUN]
    checked.fallbacks, checked.copies = {"takes no mask": 50}, 7
    checked.own_attention_seconds = {}
    assert reasons(checked, "denoise") == ["nothing recorded explains the difference"]


def test_a_gpu_that_waits_with_the_kernel_alone() -> None:
    checked = made()
    seconds = checked.measured[RUN].ms.p50 / 1000
    checked.busy_seconds = {RUN: 0.5 * seconds}
    said = "the GPU waits for the host 50 % of the time with this kernel"
    assert any(each.startswith(said) for each in reasons(checked))
    checked.busy_seconds = {RUN: 0.95 * seconds}
    assert not any("waits" in each for each in reasons(checked))
