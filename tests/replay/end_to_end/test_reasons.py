"""Each reason is tested in a case where it applies, and in one where it does not."""

from dataclasses import replace
from typing import Any

import pytest

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, Calls, Clues, Missing
from replay.end_to_end.prediction import Prediction
from replay.end_to_end.reasons import reasons
from replay.timing.statistics import summarize
from tests.factories import speedup
from tests.replay.end_to_end.predictions import interval, predicted


def made(
    measured: float = 0.9, saved: float = 0.2, attention: float = 0.2, **span: Any
) -> ModelResult:
    """Return a check: of 1 s, 0.2 s should be saved, attention takes 0.4 s; measured: 0.9 s."""
    ratio = 1 / (1 - saved)
    usual = {"speedup": interval(ratio, 0.01 * ratio), "saved_seconds": saved}
    calls = Calls(swapped=20, fell_back=2)
    of_run = predicted(RUN, ratio, **{**usual, "calls": calls, **span})
    checked = ModelResult("fast", "model", "none")
    checked.prediction = Prediction(of_run, {})
    ratio = 1 / measured
    checked.measured = {
        RUN: MeasuredSpan(
            summarize([1000 * measured] * 3),
            speedup(ratio, 0.99 * ratio, 1.01 * ratio),
            None,
            measured,
        )
    }
    checked.fallbacks = {"takes no mask": 2}
    checked.attention_seconds = {RUN: attention}
    checked.own_attention_seconds = {RUN: 0.4}
    return checked


def test_close_prediction_needs_no_reason() -> None:
    checked = made(measured=0.8)
    checked.fallbacks = {"takes no mask": 9}
    assert reasons(checked) == []
    assert reasons(made(measured=0.81)) == []


def test_unknown_cause_is_stated() -> None:
    checked = made()
    checked.attention_seconds = {}
    assert reasons(checked) == ["nothing recorded explains the difference"]


LAUNCHES = Clues(more_layer_launch_seconds=0.003)
CLOCKS = Clues(sm_clock_mhz=1900.0, power_w=500.0)
MISSING = [Missing("a", "encode", 3), Missing("b", "encode", 4), Missing("c", "denoise", 1)]
RATIO = made().measured[RUN]
SCATTERED = {RUN: replace(RATIO, ms=summarize([900.0, 900.0, 900.0 * 1.3]))}
NEARLY_STEADY = {RUN: replace(RATIO, ms=summarize([900.0, 900.0, 900.0 * 1.1]))}


@pytest.mark.parametrize(
    ("span", "result", "sentence"),
    [
        (
            {},
            {"fallbacks": {"head_dim 72": 1, "takes no mask": 5}},
            "4 more calls fell back than predicted, mostly because: takes no mask",
        ),
        ({"not_recorded": MISSING}, {}, "8 calls (encode, denoise) are unlike any replayed call"),
        (
            {"waiting_share": 0.6, "clues": LAUNCHES},
            {},
            "waits for the host 60 % of the time, and according to the replay, layers take +3 ms "
            "more to launch: the model does not gain what attention saves there",
        ),
        (
            {"waiting_share": 0.6, "clues": LAUNCHES},
            {"more_launch_seconds": {RUN: 0.002, "decode": 0.001}},
            "(attention calls alone +2 ms in the model)",
        ),
        ({"clues": Clues(scatter=24.0)}, {}, "call differ up to 24-fold (p90 / p10): the machine"),
        ({}, {"measured": SCATTERED}, "took 900 ms to 1.12 s (10th to 90th percentile) with the"),
        ({}, {"copies": 7, "hits": 20}, "7 of 22 outputs were copied into the layout that the mod"),
        (
            {"clues": CLOCKS},
            {"sm_clock_mhz": 1500.0, "power_w": 690.0},
            "the SM clock was 1900 MHz in the replay and 1500 in the model (500 and 690 W)",
        ),
    ],
)
def test_reason_is_given(span: dict[str, Any], result: dict[str, Any], sentence: str) -> None:
    checked = made(**span)
    vars(checked).update(result)
    assert any(sentence in each for each in reasons(checked))


@pytest.mark.parametrize(
    ("span", "result"),
    [
        ({"clues": LAUNCHES}, {}),
        ({"clues": Clues(scatter=1.4)}, {}),
        ({}, {"measured": NEARLY_STEADY}),
        ({"clues": CLOCKS}, {"sm_clock_mhz": 1890.0}),
        ({"clues": CLOCKS}, {}),
    ],
)
def test_small_difference_is_no_reason(span: dict[str, Any], result: dict[str, Any]) -> None:
    checked = made(**span)
    vars(checked).update(result)
    assert reasons(checked) == [
        "attention is not the cause: it changed by -200 ms in the model and by -200 ms in the "
        "replay; the rest of the model took 600 ms with its own attention and 700 ms with "
        "the kernel"
    ]


def test_attention_costs_something_else_in_the_model() -> None:
    assert reasons(made(attention=0.3)) == [
        "attention went from 400 ms to 300 ms in the model, and from 400 ms to 200 ms in the replay"
    ]


def test_sentences_of_one_phase_do_not_speak_of_the_whole_run() -> None:
    checked = made()
    span = replace(checked.prediction.run, phase="denoise")
    checked.prediction = replace(checked.prediction, phases={"denoise": span})
    checked.measured["denoise"] = checked.measured[RUN]
    checked.fallbacks, checked.copies = {"takes no mask": 50}, 7
    checked.own_attention_seconds = {}
    assert reasons(checked, "denoise") == ["nothing recorded explains the difference"]
