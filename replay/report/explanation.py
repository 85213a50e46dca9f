"""Paragraph on why a kernel is fast on its own but slow in a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.end_to_end.predicted_times import NOTABLE, RUN, PredictedTime
from replay.end_to_end.reasons import in_ms, suspects
from replay.end_to_end.time_breakdown import TimeBreakdown, break_down, main_phase, refusals
from replay.report.cells import model_speedup_text

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult

SPANS = {
    "denoise": "one denoising step",
    "prefill": "prefill, the time to the first token",
    "decode": "decode, one token",
    "encode": "one forward pass",
    RUN: "one full run, from prompt to output",
}
"""Parts of a run whose times are measured and predicted, with their descriptions."""


def span_name(span: str, steps: int) -> str:
    """Describe a span of a run with a number of training steps, or with none."""
    if not steps:
        return SPANS.get(span, span)
    if span == RUN:
        return f"one full run of {counted(steps, 'training step')}"
    return "the forward pass of a training step"


NEGLIGIBLE = 5e-4
"""Minimum loss, as a share of the time, that a sentence reports."""


def explanation(checked: ModelResult, phase: str | None = None) -> str:
    """Explain a kernel's time in a model.

    Args:
        phase: a phase, or `RUN`; by default, the phase that takes the largest part of a run.
    """
    phase = phase or main_phase(checked)
    found = break_down(checked, phase)
    title = f"{checked.kernel} in {checked.model}, {span_name(phase, checked.steps)}"
    if isinstance(found, str):
        return f"{title}: {found}."
    predicted = checked.predicted(phase)
    assert predicted is not None
    return f"{title}: {' '.join(_sentences(found, checked, predicted, phase))}"


def most_disappointing(checks: Sequence[ModelResult]) -> ModelResult | None:
    """Return the result of the kernel, fast on its own, that loses most time in the model.

    Return None if no kernel loses a notable share of the time.
    """
    worst, most = None, NOTABLE
    for checked in checks:
        found = "wrong" if checked.wrong else break_down(checked, main_phase(checked))
        if isinstance(found, TimeBreakdown) and found.core_speedup > 1:
            lost = (found.after - found.alone) / found.before
            if lost > most:
                worst, most = checked, lost
    return worst


def _sentences(
    found: TimeBreakdown, checked: ModelResult, predicted: PredictedTime, phase: str
) -> Iterator[str]:
    before = found.before
    yield (
        f"Attention takes {in_ms(found.attention)} of {in_ms(before)} "
        f"({_percent(found.attention / before)})."
    )
    what = "kernel" if predicted.clues.preparation_seconds is None else "kernel's core"
    yield (
        f"Alone, the {what} is {found.core_speedup:.2f}× as fast as the model's own attention, "
        f"which would bring {in_ms(before)} to {in_ms(found.alone)} ({before / found.alone:.2f}×)."
    )
    # Mention a loss only if it is large enough to notice.
    if abs(found.fallbacks) > NEGLIGIBLE * before:
        took = in_ms(sum(predicted.fallback_seconds.values()))
        yield (
            f"It refuses calls that take {took}, which {_costs(found.fallbacks)}: "
            f"{refusals(predicted)}."
        )
    if abs(found.preparation) > NEGLIGIBLE * before:
        yield (
            "Preparing its inputs before the core (layout changes, quantisation) "
            f"{_costs(found.preparation)}."
        )
    more = predicted.clues.more_layer_launch_seconds
    if predicted.waiting_share:
        launch = "" if more is None else f" and launching its layers takes {_more(more)}"
        yield (
            f"The GPU waits for the host {_percent(predicted.waiting_share)} of the time{launch}, "
            f"so the host decides, which {_costs(found.launches)}."
        )
    elif abs(found.launches) > NEGLIGIBLE * before:
        why = "Caches are colder in the model"
        if more is not None:  # on a GPU
            why = f"Launching its layers takes {_more(more)}, so that the GPU waits for the host"
        yield f"{why}, which {_costs(found.launches)}."
    if abs(found.swap) > NEGLIGIBLE * before:
        yield f"Swapping a kernel in (its choice, checks and counts) {_costs(found.swap)}."
    yield (
        f"That predicts {in_ms(found.predicted)} ({before / found.predicted:.2f}×); "
        f"measured: {model_speedup_text(found.speedup)}."
    )
    if found.speedup.holds(1.0) and found.speedup.verdict != "same":
        yield "The interval contains 1, so the kernel may be faster or slower."
    if found.speedup.holds(before / found.predicted):
        yield "The interval contains the prediction."
        return
    less, remainder = found.less_in_model or 0.0, found.remainder
    if abs(less) > NEGLIGIBLE * before:
        word = "less" if less > 0 else "more"
        yield f"Attention saves {in_ms(abs(less))} {word} in the model than in the replay."
    unexplained = f"{in_ms(abs(remainder))} ({_percent(abs(remainder) / before)} of the time)"
    if abs(remainder) <= NEGLIGIBLE * before:
        yield "Nothing is left unexplained."
    elif remainder > 0:
        yield f"Another {unexplained} is unexplained."
    else:
        yield f"It took {unexplained} less than all this, which is unexplained."
    notable = max(abs(less), abs(remainder)) >= NOTABLE * before
    if notable and (causes := list(suspects(checked, predicted, phase))):
        yield f"Possible causes: {'; '.join(causes)}."


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _costs(seconds: float) -> str:
    return f"{'costs' if seconds > 0 else 'saves'} {in_ms(abs(seconds))}"


def _more(seconds: float) -> str:
    return f"{in_ms(abs(seconds))} {'more' if seconds > 0 else 'less'}"
