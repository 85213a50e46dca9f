"""Breakdown of a model's time with a kernel, from the core's speed-up to the measured time.

Outside the model, a kernel's core is s times as fast as the model's own attention. That attention
takes the time a out of the model's total T_old. If nothing else mattered, Amdahl's law would give

    T_old − a · (1 − 1 / s)

The following terms are added:

    + a_refused · (1 − 1 / s)       for refused calls, which stay as they are
    + preparation                   for layout changes and quantisation before the core
    + saved − gained                for savings during which the GPU waits for the host anyway,
                                    and for more expensive launches; on a CPU, for cold caches
    + swap                          for swapping the kernel in: its choice, checks and counts

The sum is the prediction (`replay.end_to_end.prediction`). Two more terms lead to the measured
time:

    + the part of the replay's saving that the model does not show
    + an unexplained remainder
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.end_to_end.predicted_times import RUN, PredictedTime
from replay.rows.row import Speedup

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of one forward of a phase, or of one full run; a negative loss is a gain."""

    before: float
    """Measured time with the model's own attention."""
    attention: float
    """Replayed time of the model's own attention for all calls that reach the kernel."""
    core_speedup: float
    """Speed-up of the kernel's core over the model's own attention, on calls that the kernel
    handles; of its drop-in if it has no core."""
    fallbacks: float
    preparation: float
    launches: float
    swap: float
    less_in_model: float | None
    """Saving in the replay that does not appear in the model; None if attention was not timed in
    the model, or if the host's launches determine the time."""
    speedup: Speedup
    """Measured speed-up, over adjacent runs of the model's own attention."""

    @property
    def after(self) -> float:
        """Time with the kernel at the speed of the machine that `before` was measured at."""
        return self.before / self.speedup.ratio

    @property
    def alone(self) -> float:
        """Time by Amdahl's law if all attention had the core's speed-up."""
        return self.before - self.attention * (1 - 1 / self.core_speedup)

    @property
    def predicted(self) -> float:
        return self.alone + self.fallbacks + self.preparation + self.launches + self.swap

    @property
    def remainder(self) -> float:
        return self.after - self.predicted - (self.less_in_model or 0.0)


def main_phase(checked: ModelResult) -> str:
    """Return the phase that takes the largest part of a run; `RUN` if no phase was measured, or if
    the run trains."""
    phases = {} if checked.prediction is None else checked.prediction.phases
    measured = [phase for phase in phases if phase in checked.measured]
    if checked.steps or not measured:
        return RUN
    return max(measured, key=lambda each: phases[each].forwards * phases[each].old_seconds.value)


def break_down(checked: ModelResult, span: str) -> TimeBreakdown | str:
    """Break down a kernel's time in a model, or return a phrase that states why this is impossible.

    Args:
        checked: the result of a kernel, not of the model's own attention.
        span: a phase, or `RUN`.
    """
    if checked.status != "ok":
        return f"it did not run in the model ({checked.status}): {checked.reason}"
    predicted, measured = checked.predicted(span), checked.measured.get(span)
    if predicted is None:
        return f"nothing was predicted: {checked.unpredicted}"
    if measured is None:
        return "it was not measured"
    if measured.speedup is None:
        return f"it answered no call: {'; '.join(checked.fallbacks)}"
    if predicted.saved_seconds is None or predicted.swapped_seconds is None:
        return f"nothing was predicted: {predicted.reason}"
    refused = sum(predicted.fallback_seconds.values())
    if not predicted.swapped_seconds:
        return f"the kernel answers no call: it refuses {refusals(predicted)}"
    if predicted.new_seconds is None:
        return f"nothing was predicted: {predicted.reason}"
    # The core's time is the drop-in time without the preparation.
    drop_in = predicted.swapped_seconds - predicted.saved_seconds
    preparation = predicted.clues.preparation_seconds or 0.0
    speedup = predicted.swapped_seconds / (drop_in - preparation)
    before = predicted.old_seconds.value
    launches = (
        predicted.saved_seconds - (before - predicted.new_seconds.value) - predicted.swap_seconds
    )
    found = TimeBreakdown(
        before=before,
        attention=predicted.swapped_seconds + refused,
        core_speedup=speedup,
        fallbacks=refused * (1 - 1 / speedup),
        preparation=preparation,
        launches=launches,
        swap=predicted.swap_seconds,
        less_in_model=_less_in_model(checked, predicted, span, launches),
        speedup=measured.speedup,
    )
    return found if found.predicted > 0 else "its stored times do not add up"


def refusals(predicted: PredictedTime) -> str:
    """Format as `32 calls a run (head_dim 72), 8 calls a run (takes no mask)`, most calls first."""
    ranked = sorted(predicted.fallbacks.items(), key=lambda item: -item[1])
    return ", ".join(f"{counted(calls, 'call')} a run ({reason})" for reason, calls in ranked)


def _less_in_model(
    checked: ModelResult, predicted: PredictedTime, span: str, launches: float
) -> float | None:
    before = checked.own_attention_seconds.get(span)
    after = checked.attention_seconds.get(span)
    is_training = checked.steps and span == RUN  # the time in the model is that of forward passes
    if before is None or after is None or predicted.waiting_share or is_training:
        return None
    assert predicted.saved_seconds is not None
    foretold = predicted.saved_seconds - (0 if checked.busy_seconds else launches)
    return foretold - (before - after)
