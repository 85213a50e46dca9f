"""Explanations of models that gain less than their kernels, with hand-made breakdowns."""

from dataclasses import replace
from typing import Any

import pytest

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, Calls, Clues, PredictedTime
from replay.end_to_end.prediction import Prediction
from replay.end_to_end.time_breakdown import main_phase
from replay.report.explanation import explanation, most_disappointing
from replay.report.model_tables import print_checks
from replay.timing.statistics import summarize
from tests.factories import speedup
from tests.printed import printed
from tests.replay.end_to_end.predictions import interval, predicted

STEP = predicted(
    "denoise",
    1 / 0.85,
    forwards=4,
    attention_seconds=0.5,
    attention_share=0.5,
    saved_seconds=0.15,
    calls=Calls(swapped=160, fell_back=40),
    fallbacks={"takes no mask": 8, "head_dim 72": 32},
    fallback_seconds={"takes no mask": 0.02, "head_dim 72": 0.08},
    clues=Clues(preparation_seconds=0.05),
)
"""Handled calls take 0.25 s instead of 0.4 s. The core takes 0.2 s of this, half of 0.4 s, after
0.05 s of preparation. Refused calls take 0.1 s."""


def checked(span: PredictedTime = STEP, ms: float = 920.0, **fields: Any) -> ModelResult:
    run = replace(span, phase=RUN, forwards=1)
    found = ModelResult("fast", "flux", "trained", prediction=Prediction(run, {span.phase: span}))
    ratio = 1000 * span.old_seconds.value / ms
    gain = speedup(ratio, ratio - 0.005, ratio + 0.005)
    # The median is that of a slower machine than the baseline's.
    found.measured = {
        name: MeasuredSpan(summarize([ms + 50] * 3), gain, None, ms / 1000)
        for name in (span.phase, RUN)
    }
    found.own_attention_seconds = {span.phase: 0.52}
    found.attention_seconds = {span.phase: 0.42}
    return replace(found, **fields)


def test_every_loss_is_named_and_they_add_up() -> None:
    assert explanation(checked()) == (
        "fast in flux, one denoising step: Attention takes 500 ms of 1 s (50 %). Alone, the "
        "kernel's core is 2.00× as fast as the model's own attention, which would bring 1 s to "
        "750 ms (1.33×). It refuses calls that take 100 ms, which costs 50 ms: 32 calls a run "
        "(head_dim 72), 8 calls a run (takes no mask). Preparing its inputs before the core "
        "(layout changes, quantisation) costs 50 ms. That predicts 850 ms (1.18×); measured: "
        "1.09× (1.08-1.09). Attention saves 50 ms less in the model than in the replay. Another "
        "20 ms (2 % of the time) is unexplained."
    )


def test_launches_decide_where_the_gpu_waits_for_the_host() -> None:
    span = replace(
        STEP,
        phase="decode",
        old_seconds=interval(0.02),
        new_seconds=interval(0.0205),
        waiting_share=0.6,
        saved_seconds=0.002,
        swapped_seconds=0.004,
        fallbacks={},
        fallback_seconds={},
        clues=Clues(more_layer_launch_seconds=0.0006),
    )
    found = checked(span, 21.0)
    assert explanation(found) == (
        "fast in flux, decode, one token: Attention takes 4 ms of 20 ms (20 %). Alone, the kernel "
        "is 2.00× as fast as the model's own attention, which would bring 20 ms to 18 ms (1.11×). "
        "The GPU waits for the host 60 % of the time and launching its layers takes 0.6 ms more, "
        "so the host decides, which costs 2.5 ms. That predicts 20.5 ms (0.98×); measured: "
        "0.95× (0.95-0.96). Another 0.5 ms (2.5 % of the time) is unexplained."
    )


@pytest.mark.parametrize(
    ("clues", "busy", "sentence", "less"),
    [
        (
            Clues(preparation_seconds=0.05, more_layer_launch_seconds=0.3),
            {"denoise": 0.9},
            "Launching its layers takes 300 ms more, so that the GPU waits for the host, which "
            "costs 20 ms.",
            "50 ms",
        ),
        (STEP.clues, {}, "Caches are colder in the model, which costs 20 ms.", "30 ms"),
    ],
)
def test_model_that_gains_less_than_its_attention(
    clues: Clues, busy: dict[str, float], sentence: str, less: str
) -> None:
    span = replace(STEP, new_seconds=interval(0.88), swap_seconds=0.01, clues=clues)
    text = explanation(checked(span, ms=920.0, busy_seconds=busy))
    assert f"{sentence} Swapping a kernel in (its choice, checks and counts) costs 10 ms." in text
    assert f"Attention saves {less} less in the model than in the replay." in text


def test_explanation_covers_a_better_result() -> None:
    found = checked(ms=780.0)
    found.attention_seconds = {"denoise": 0.32}
    assert explanation(found).endswith(
        "Attention saves 50 ms more in the model than in the replay. It took 20 ms (2 % of the "
        "time) less than all this, which is unexplained."
    )
    found = replace(found, attention_seconds={}, measured=checked(ms=850).measured)
    text = explanation(found)
    assert text.endswith("measured: 1.18× (1.17-1.18). The interval contains the prediction.")
    assert explanation(checked(ms=900)).endswith("Nothing is left unexplained.")


@pytest.mark.parametrize(
    ("low", "high", "mark"), [(0.98, 1.02, " same"), (0.79, 1.32, " ?"), (0.9, 0.99, "")]
)
def test_table_and_explanation_give_one_speedup(low: float, high: float, mark: str) -> None:
    found = checked(drift={"nan_count": 0})
    found.measured = {
        name: replace(each, speedup=speedup(0.98, low, high))
        for name, each in found.measured.items()
    }
    text, table = explanation(found), printed(print_checks, [found, found])
    assert f"measured: 0.98× ({low:.2f}-{high:.2f}){mark}." in text
    assert f"0.98× ({low:.2f}-{high:.2f}){mark}" in table
    assert ("contains 1," in text) == (mark == " ?")


def test_causes_of_unknown_size_are_listed() -> None:
    found = checked(sm_clock_mhz=1500.0)
    assert "Possible causes" not in explanation(found)
    clues = replace(STEP.clues, sm_clock_mhz=1980.0)
    found = replace(found, prediction=Prediction(STEP, {"denoise": replace(STEP, clues=clues)}))
    assert explanation(found).endswith(
        " Possible causes: the SM clock was 1980 MHz in the replay and 1500 in the model."
    )


REFUSED = Prediction(STEP, {"denoise": replace(STEP, swapped_seconds=0.0, saved_seconds=0.0)})
REASONS: list[tuple[dict[str, Any], str]] = [
    ({"status": "crash", "reason": "SIGSEGV"}, "it did not run in the model (crash): SIGSEGV."),
    ({"prediction": None, "unpredicted": "x"}, "nothing was predicted: x."),
    ({"prediction": REFUSED}, "the kernel answers no call: it refuses 32 calls a run (head_dim"),
]


@pytest.mark.parametrize(("change", "sentence"), REASONS)
def test_missing_breakdown_has_a_reason(change: dict[str, Any], sentence: str) -> None:
    found = replace(checked(), **change)
    text = explanation(found, "denoise")
    assert text.startswith(f"fast in flux, one denoising step: {sentence}")


def test_main_phase_takes_most_of_a_run() -> None:
    found = checked()
    prefill = replace(STEP, phase="prefill", forwards=1, old_seconds=interval(3.0))
    found.prediction.phases["prefill"] = prefill
    found.measured["prefill"] = found.measured["denoise"]
    assert main_phase(found) == "denoise"  # four forward passes of a second each
    found.prediction.phases["prefill"] = replace(prefill, forwards=2)
    assert main_phase(found) == "prefill"
    assert main_phase(replace(found, prediction=None)) == RUN


def test_the_most_disappointing_is_fast_alone() -> None:
    better, worse = checked(ms=800.0), checked(ms=900.0)
    slow = checked(replace(STEP, saved_seconds=-0.2), ms=2000.0)  # the kernel itself is slow too
    assert most_disappointing([better, worse, slow]) is worse
    assert most_disappointing([checked(ms=760.0)]) is None
