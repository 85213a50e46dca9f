"""Explanations of differences between prediction and measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.end_to_end.predicted_times import NOTABLE, RUN, PredictedTime

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult

SCATTERED = 2.0
"""Minimum p90 / p10 of a replayed call that indicates other load on the machine."""
UNSTEADY = 1.2
"""Minimum p90 / p10 of a run of the model that indicates other load."""


def reasons(checked: ModelResult, span: str = RUN) -> list[str]:
    """List possible explanations of the difference, one sentence each.

    The list is empty if the prediction lies inside the measured interval or within `NOTABLE` of the
    measurement; it has a single sentence if no recorded figure explains the difference.
    """
    predicted, measured = checked.predicted(span), checked.measured.get(span)
    if predicted is None or predicted.speedup is None or predicted.new_seconds is None:
        return []
    if measured is None or measured.speedup is None:
        return []
    error = checked.prediction_error(span) or 0.0
    if abs(error) < NOTABLE or measured.speedup.holds(predicted.speedup.value):
        return []
    found = [
        *suspects(checked, predicted, span),
        *_waits(checked, predicted, span),
        *_attention(checked, predicted, span),
    ]
    return found or ["nothing recorded explains the difference"]


def suspects(checked: ModelResult, predicted: PredictedTime, span: str) -> Iterator[str]:
    """Yield possible causes of a difference of unknown size, one sentence each."""
    # Fallbacks and copies are counted over a full run.
    more = sum(checked.fallbacks.values()) - predicted.calls.fell_back
    if span == RUN and more > 0:
        reason = max(checked.fallbacks, key=lambda each: checked.fallbacks[each])
        yield f"{more} more calls fell back than predicted, mostly because: {reason}"
    if calls := sum(missing.calls for missing in predicted.not_recorded):
        where = ", ".join(dict.fromkeys(missing.phase for missing in predicted.not_recorded))
        yield (
            f"{counted(calls, 'call')} ({where}) are unlike any replayed call: the prediction "
            "assumes that their time stays the same"
        )
    scatter = predicted.clues.scatter
    if scatter is not None and scatter >= SCATTERED:
        yield (
            f"rounds of the costliest call differ up to {scatter:.0f}-fold (p90 / p10): the "
            "machine had other load, so replay and measure again when it is idle"
        )
    ms = checked.measured[span].ms
    if ms.p90 >= UNSTEADY * ms.p10:
        yield (
            f"the model took {in_ms(ms.p10 / 1000)} to {in_ms(ms.p90 / 1000)} (10th to 90th "
            "percentile) with the kernel: the machine had other load, so measure again when it is "
            "idle, or with more --model-rounds"
        )
    if checked.copies and span == RUN:
        outputs = checked.hits + sum(checked.fallbacks.values())  # a compiled model copies both
        yield (
            f"{checked.copies} of {outputs} outputs were copied into the layout that "
            "the model expects"
        )
    replayed, in_model = predicted.clues.sm_clock_mhz, checked.sm_clock_mhz
    if replayed and in_model and abs(in_model / replayed - 1) >= NOTABLE:
        power = ""
        if predicted.clues.power_w and checked.power_w:
            power = f" ({predicted.clues.power_w:.0f} and {checked.power_w:.0f} W)"
        yield (
            f"the SM clock was {replayed:.0f} MHz in the replay and {in_model:.0f} in the model"
            f"{power}"
        )


def _waits(checked: ModelResult, predicted: PredictedTime, span: str) -> list[str]:
    """Report a GPU that waits for the host."""
    if not predicted.waiting_share:
        return []
    more = predicted.clues.more_layer_launch_seconds
    costs = (
        ""
        if more is None
        else f", and according to the replay, layers take {in_ms(more, '+')} more to launch"
    )
    if more is not None and (in_model := checked.more_launch_seconds.get(span)) is not None:
        costs += f" (attention calls alone {in_ms(in_model, '+')} in the model)"
    return [
        f"the GPU waits for the host {100 * predicted.waiting_share:.0f} % of the time{costs}: "
        "the model does not gain what attention saves there"
    ]


def _attention(checked: ModelResult, predicted: PredictedTime, span: str) -> list[str]:
    """Compare the cost of the calls in the model and in the replay, with both kernels."""
    before = checked.own_attention_seconds.get(span)
    after = checked.attention_seconds.get(span)
    if before is None or after is None or predicted.saved_seconds is None:
        return []
    assert predicted.new_seconds is not None
    unlike = (before - after) - predicted.saved_seconds
    if abs(unlike) < NOTABLE * predicted.new_seconds.value:
        rest = checked.measured[span].seconds - after
        return [
            f"attention is not the cause: it changed by {in_ms(after - before, '+')} in the model "
            f"and by {in_ms(-predicted.saved_seconds, '+')} in the replay; the rest of the "
            f"model took {in_ms(predicted.old_seconds.value - before)} with its own attention and "
            f"{in_ms(rest)} with the kernel"
        ]
    return [
        f"attention went from {in_ms(before)} to {in_ms(after)} in the model, and from "
        f"{in_ms(predicted.attention_seconds)} to "
        f"{in_ms(predicted.attention_seconds - predicted.saved_seconds)} in the replay"
    ]


def in_ms(seconds: float, sign: str = "-") -> str:
    """Format seconds as `12.3 ms` or `1.23 s`; with `sign="+"`, positive numbers get a `+`."""
    if abs(seconds) >= 1:
        return f"{seconds:{sign}.3g} s"
    return f"{1000 * seconds:{sign}.3g} ms"
