"""Why prediction and measurement differ, where they do."""

from __future__ import annotations

from replay.speedcheck.check import Checked
from replay.speedcheck.prediction import RUN, Span

NOTABLE = 0.02
"""Relative difference of clocks, or share of a span's time, that is worth a sentence."""


def reasons(checked: Checked, span: str = RUN) -> list[str]:
    """What is known that could explain the difference, a sentence each.

    Empty where the prediction lies inside the measured interval; a single sentence where it does
    not and nothing is known that would explain it.
    """
    predicted, measured = checked.predicted(span), checked.measured.get(span)
    if predicted is None or predicted.speedup is None or predicted.new_seconds is None:
        return []
    if measured is None or measured.speedup is None:
        return []
    if measured.speedup.low <= predicted.speedup.value <= measured.speedup.high:
        return []
    found = [
        *_fallbacks(checked, predicted, span),
        *_not_recorded(predicted),
        *_copies(checked, span),
        *_launches(predicted),
        *_clocks(checked, predicted),
    ]
    return found or ["nothing that was recorded explains the difference"]


def _fallbacks(checked: Checked, predicted: Span, span: str) -> list[str]:
    """Fallbacks are counted over a whole run."""
    if span != RUN:
        return []
    more = sum(checked.fallbacks.values()) - predicted.calls.fell_back
    if more <= 0:
        return []
    reason = max(checked.fallbacks, key=lambda each: checked.fallbacks[each])
    return [f"{more} calls more than predicted fell back, most because: {reason}"]


def _not_recorded(predicted: Span) -> list[str]:
    calls = sum(missing.calls for missing in predicted.not_recorded)
    if not calls:
        return []
    where = ", ".join(dict.fromkeys(missing.phase for missing in predicted.not_recorded))
    return [
        f"{calls} calls ({where}) were swapped too, of which no like was replayed: what they gain "
        "or lose is not in the prediction"
    ]


def _copies(checked: Checked, span: str) -> list[str]:
    if not checked.copies or span != RUN:
        return []
    return [f"{checked.copies} outputs were copied into the layout that the model expects"]


def _launches(predicted: Span) -> list[str]:
    """Small calls wait for the host, which a replay hides and a model may not."""
    launch = predicted.clues.launch_seconds
    if launch is None or predicted.new_seconds is None:
        return []
    if launch < NOTABLE * predicted.new_seconds.value:
        return []
    return [
        f"launching the kernel takes the host {1000 * launch:.3g} ms, of "
        f"{1000 * predicted.new_seconds.value:.3g} ms in all: a model that waits for its launches "
        "gains less"
    ]


def _clocks(checked: Checked, predicted: Span) -> list[str]:
    replayed, in_model = predicted.clues.sm_clock_mhz, checked.sm_clock_mhz
    if not replayed or not in_model or abs(in_model / replayed - 1) < NOTABLE:
        return []
    power = ""
    if predicted.clues.power_w and checked.power_w:
        power = f" ({predicted.clues.power_w:.0f} and {checked.power_w:.0f} W)"
    return [
        f"the SM clock was {replayed:.0f} MHz in the replay and {in_model:.0f} in the model{power}"
    ]
