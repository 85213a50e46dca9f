"""Predicted times of a model."""

from dataclasses import replace
from typing import Any

from replay.end_to_end.predicted_times import Calls, Estimate, PredictedTime


def interval(value: float, spread: float = 0.0) -> Estimate:
    return Estimate(value, value - spread, value + spread)


def predicted(phase: str, ratio: float, **fields: Any) -> PredictedTime:
    """Return a prediction for 1 s, in which the kernel replaces attention that takes 0.4 s."""
    usual = PredictedTime(
        phase=phase,
        forwards=1,
        old_seconds=interval(1.0),
        new_seconds=interval(1 / ratio),
        speedup=interval(ratio, 0.02),
        attention_seconds=0.4,
        attention_share=0.4,
        waiting_share=0.0,
        saved_seconds=0.1,
        swapped_seconds=0.4,
        swap_seconds=0.0,
        calls=Calls(32),
    )
    return replace(usual, **fields)
