"""Each possible cause is tested in a case where it applies, and in one where it does not."""

from dataclasses import replace
from typing import Any

import pytest

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, Calls, Clues, Missing
from replay.end_to_end.prediction import Prediction
from replay.end_to_end.reasons import is_off, suspects
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


def causes(checked: ModelResult, span: str = RUN) -> list[str]:
    return list(suspects(checked, checked.predicted(span), span))


def test_close_prediction_is_not_off() -> None:
    checked = made(measured=0.8)
    assert not is_off(checked)
    assert not is_off(made(measured=0.81))
    assert is_off(made())


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
    assert any(sentence in each for each in causes(checked))


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
    assert causes(checked) == []


def test_sentences_of_one_phase_do_not_speak_of_the_whole_run() -> None:
    checked = made()
    span = replace(checked.prediction.run, phase="denoise")
    checked.prediction = replace(checked.prediction, phases={"denoise": span})
    checked.measured["denoise"] = checked.measured[RUN]
    checked.fallbacks, checked.copies = {"takes no mask": 50}, 7
    checked.own_attention_seconds = {}
    assert causes(checked, "denoise") == []
