"""Where a model's time goes with a kernel, from what the kernel does alone to what was measured.

Alone, a kernel's core is s times as fast as the model's own attention, which takes a of the model's
T_old. With nothing else, Amdahl's law says T_old − a · (1 − 1 / s). What takes it away from there:

    + a_refused · (1 − 1 / s)       calls that the kernel refuses stay as they are
    + preparation                   of the others, what comes before the core: layout, quantisation
    + saved − gained                what attention saves where the GPU waits for the host anyway,
                                    and what launches cost more

which is the prediction (`replay.end_to_end.prediction`), and to what was measured

    + what attention saves less in the model than in the replay
    + a remainder, which nobody explains
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.end_to_end.predicted_times import RUN, PredictedTime

if TYPE_CHECKING:
    from replay.end_to_end.model_check import Checked


@dataclass(frozen=True)
class Account:
    """Seconds of one forward of a phase, or of one full run. A negative loss is a gain."""

    before: float
    """Measured, with the model's own attention."""
    attention: float
    """The model's own attention for the calls that the kernel is asked for, in the replay."""
    core_speedup: float
    """Of the kernel's core over it, where the kernel answers; of its drop-in without a core."""
    fallbacks: float
    preparation: float
    launches: float
    less_in_model: float | None
    """None where attention was not timed in the model, or launches decide."""
    after: float
    """Measured, with the kernel."""

    @property
    def alone(self) -> float:
        """By Amdahl's law, with the core's speed-up for all attention."""
        return self.before - self.attention * (1 - 1 / self.core_speedup)

    @property
    def predicted(self) -> float:
        return self.alone + self.fallbacks + self.preparation + self.launches

    @property
    def remainder(self) -> float:
        return self.after - self.predicted - (self.less_in_model or 0.0)


def main_phase(checked: Checked) -> str:
    """The phase that takes most of a run; `RUN` if none was measured."""
    phases = {} if checked.prediction is None else checked.prediction.phases
    measured = [phase for phase in phases if phase in checked.measured]
    if not measured:
        return RUN
    return max(measured, key=lambda each: phases[each].forwards * phases[each].old_seconds.value)


def account(checked: Checked, span: str) -> Account | str:
    """Account for a kernel's time in a model, or say in a phrase why there is no account.

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
    if predicted.saved_seconds is None or predicted.swapped_seconds is None:
        return f"nothing was predicted: {predicted.reason}"
    refused = sum(predicted.fallback_seconds.values())
    if not predicted.swapped_seconds:
        return f"the kernel answers no call: it refuses {refusals(predicted)}"
    if predicted.new_seconds is None:
        return f"nothing was predicted: {predicted.reason}"
    drop_in = predicted.swapped_seconds - predicted.saved_seconds
    preparation = predicted.clues.preparation_seconds or 0.0
    speedup = predicted.swapped_seconds / (drop_in - preparation)
    before = predicted.old_seconds.value
    return Account(
        before=before,
        attention=predicted.swapped_seconds + refused,
        core_speedup=speedup,
        fallbacks=refused * (1 - 1 / speedup),
        preparation=preparation,
        launches=predicted.saved_seconds - (before - predicted.new_seconds.value),
        less_in_model=_less_in_model(checked, predicted, span),
        after=measured.ms.p50 / 1000,
    )


def refusals(predicted: PredictedTime) -> str:
    """`32 calls a run (head_dim 72), 8 calls a run (takes no mask)`: most calls first."""
    ranked = sorted(predicted.fallbacks.items(), key=lambda item: -item[1])
    return ", ".join(f"{counted(calls, 'call')} a run ({reason})" for reason, calls in ranked)


def _less_in_model(checked: Checked, predicted: PredictedTime, span: str) -> float | None:
    before = checked.own_attention_seconds.get(span)
    after = checked.attention_seconds.get(span)
    if before is None or after is None or predicted.waiting_share:
        return None
    assert predicted.saved_seconds is not None
    return predicted.saved_seconds - (before - after)
