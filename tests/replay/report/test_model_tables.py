"""Tables of an end-to-end check, with hand-made results."""

from dataclasses import replace

import pytest

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, Missing, PredictedTime
from replay.end_to_end.prediction import Prediction
from replay.report.model_tables import print_checks
from replay.timing.statistics import summarize
from tests.factories import speedup
from tests.printed import printed
from tests.replay.end_to_end.predictions import predicted

LONG = "sage2-fp8-sm90[quant=per_warp,accum=fp32+fp32]@another_environment"
DRIFT = {"kl": 1.25e-3, "top1_agreement": 0.985, "baseline_perplexity": 12.25, "perplexity": 12.5}
CRASHED = ModelResult("bad", "llama", "trained", "crash", "ended by SIGSEGV")
OUTPUT = {"first_diverging_token": 17, "relative_l1": 0.0125, "cosine": 0.99991, "nan_count": 0}


def measured(ms: float, ratio: float | None, tokens: int | None) -> MeasuredSpan:
    gain = None if ratio is None else speedup(ratio, ratio - 0.01, ratio + 0.01)
    rate = None if tokens is None else 1000 * tokens / ms
    return MeasuredSpan(summarize([1.5 * ms] * 5), gain, rate, ms / 1000)  # on a slower machine


def span(phase: str, ratio: float) -> PredictedTime:
    waiting = 0.6 if phase == "decode" else 0.0
    missing = [Missing("a", "encode", 2)] if phase == RUN else []
    return predicted(phase, ratio, waiting_share=waiting, not_recorded=missing)


def checked(kernel: str, factor: float) -> ModelResult:
    found = ModelResult(kernel, "llama", "trained")
    tokens = {"prefill": 8192, "decode": 1, RUN: None}
    for name, ms in (("prefill", 412.5), ("decode", 23.25), (RUN, 2345.0)):
        ratio = None if factor == 1 else factor
        found.measured[name] = measured(ms / factor, ratio, tokens[name])
    if factor != 1:
        spans = {name: span(name, 1.5) for name in ("prefill", "decode", RUN)}
        found.prediction = Prediction(spans.pop(RUN), spans)
        found.drift = {**DRIFT, **OUTPUT}
        found.hits, found.fallbacks, found.peak_bytes = 1984, {"takes no mask": 64}, 14_250_000_000
    return found


def shown(width: int, *checks: ModelResult) -> list[str]:
    return [line.rstrip() for line in printed(print_checks, checks, width=width).splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_cut_no_text(width: int) -> None:
    lines = shown(width, checked("the model's own", 1), checked("fast", 1.25), checked(LONG, 1.25))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    figures = ["1.50× (1.48-1.52)", "1.25× (1.24-1.26)", "+20.0 %", "24824", "14.25", "1984"]
    figures += ["KL 0.0013, top-1 98.5 %", "perplexity 12.2 → 12.5", "differs from token 17"]
    for figure in figures:
        assert text.count(figure) >= 2, figure
    # Only the name of a kernel may be folded.
    assert LONG in "".join(line.partition(" ")[0] for line in lines)


def test_tables_have_titles_and_figures_of_each_span() -> None:
    lines = shown(80, checked("the model's own", 1), checked("fast", 1.25))
    assert "prefill, the time to the first token · attention 40 %" in lines
    assert "decode, one token · attention 40 % · GPU waits for the host 60 %" in lines
    assert "one full run, from prompt to output · attention at least 40 %" in lines
    assert [line[:15] for line in lines if "412.5" in line] == ["the model's own"]
    (run,) = [line for line in lines if line.startswith("fast") and "1.876" in line]  # seconds
    assert " ".join(run.split()[1:]) == "1.876 1.50× (1.48-1.52) 1.25× (1.24-1.26) +20.0 %"


def test_rounds_are_those_of_the_kernels() -> None:
    own, fast = checked("the model's own", 1), checked("fast", 1.25)
    for name, each in own.measured.items():  # one baseline run for every two kernels
        own.measured[name] = replace(each, ms=summarize([1.0] * 15))
    assert "llama end to end · 5 rounds" in shown(80, own, CRASHED, fast)
    assert "llama end to end · 15 rounds" in shown(80, own, CRASHED)
    assert "no kernel to run in the model: choose some with --kernels" in shown(80, own)


def test_incomplete_rows_have_a_reason() -> None:
    own = checked("the model's own", 1)
    unlike = checked("odd", 1.25)
    run = replace(unlike.prediction.run, speedup=None, new_seconds=None, reason="wrong on a: x")
    unlike.prediction = replace(unlike.prediction, run=run, phases={})
    without = checked("new", 1.25)
    without.prediction, without.unpredicted = None, "torch-default was timed on none"
    lines = shown(80, own, CRASHED, unlike, without, replace(without, kernel="newer"))
    assert "bad: ended by SIGSEGV" in lines
    assert any(line.split()[:2] == ["bad", "crash"] for line in lines)
    assert "not predicted: odd: wrong on a: x" in lines
    assert "not predicted: new, newer: torch-default was timed on none" in lines
    assert "odd: 64 calls fell back: takes no mask" in lines
    assert not any(line.startswith("bad") and "×" in line for line in lines)


def test_a_check_says_nothing_to_the_terminal() -> None:
    own = replace(checked("the model's own", 1.0), model="m\x1b[2J", weights="\x07")
    failed = replace(checked("k", 1.0), status="error", reason="r\x1b[2J")
    assert all(line.isprintable() for line in shown(80, own, failed))


def test_notes_on_single_kernels() -> None:
    own, fast, slow = checked("the model's own", 1), checked("fast", 1.25), checked("slow", 1.1)
    own.delayed, fast.delayed, slow.delayed = 0.03, 0.07, 0.12
    slow.changed_inputs, slow.own_calls, slow.missing = ["key"], 31, ["layers.7"]
    text = " ".join(shown(80, own, fast, slow))
    for note in (
        "12 % of the time (3 % without the kernel) went to delays of single forwards",
        "changes its key in place: a model that reads the key again",
        "31 calls left to the model's own attention",
        "not in the model: layers.7",
    ):
        assert f"slow: {note}" in text
    assert "fast: " not in text.replace("fast: 64 calls fell back", "")


def test_training_shows_the_time_of_a_step_and_marks_wrong_kernels() -> None:
    own, right, wrong = (
        checked(name, at) for name, at in (("own", 1), ("right", 1.25), ("bad", 2))
    )
    for each in (own, right, wrong):
        each.steps = 10
    wrong.wrong = "grad_key is wrong"
    wrong.prediction = replace(
        wrong.prediction, run=replace(wrong.prediction.run, reason="inaccurate on a")
    )
    lines = shown(80, own, right, wrong)
    assert "one full run of 10 training steps · attention at least 40 %" in lines
    assert "the forward pass of a training step · attention 40 %" in lines
    assert not any("first token" in line or "tokens/s" in line for line in lines)
    (run,) = [line.split() for line in lines if line.startswith("right") and "187.6" in line]
    assert run[1:3] == ["1.876", "187.6"]
    marked = [line.split()[0] for line in lines if "✗ trains wrongly" in line]
    assert marked == ["bad"]
    assert "✗ bad trains wrongly: grad_key is wrong" in lines
    assert not any("not predicted" in line for line in lines)


def test_kernel_without_a_call_has_no_ratio() -> None:
    refused = checked("refused", 1.25)
    for name, each in refused.measured.items():
        refused.measured[name] = replace(each, speedup=None)
    lines = shown(80, checked("own", 1), refused)
    assert [line.split()[0] for line in lines if line.startswith("refused ")] == ["refused"]
    assert "refused: 64 calls fell back: takes no mask" in lines
