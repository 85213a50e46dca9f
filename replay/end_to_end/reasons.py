"""Differences between prediction and measurement, and their possible causes."""

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


def is_off(checked: ModelResult, span: str = RUN) -> bool:
    """Return True if a prediction is outside the measured interval, and not close to the
    measurement."""
    predicted, measured = checked.predicted(span), checked.measured.get(span)
    if predicted is None or predicted.speedup is None or predicted.new_seconds is None:
        return False
    if measured is None or measured.speedup is None:
        return False
    error = checked.prediction_error(span) or 0.0
    return abs(error) >= NOTABLE and not measured.speedup.holds(predicted.speedup.value)


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


def in_ms(seconds: float, sign: str = "-") -> str:
    """Format seconds as `12.3 ms` or `1.23 s`; with `sign="+"`, positive numbers get a `+`."""
    if abs(seconds) >= 1:
        return f"{seconds:{sign}.3g} s"
    return f"{1000 * seconds:{sign}.3g} ms"
