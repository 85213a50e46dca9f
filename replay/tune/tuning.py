"""Result of a tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult
    from replay.plan.plan import Plan
    from replay.rows.row import Row, Speedup
    from replay.tune.quality import Quality


@dataclass(frozen=True)
class Tuning:
    """Result of a tuning."""

    sentence: str
    """Result in one sentence."""
    plan: Plan | None = None
    """The plan; None if none is faster than the model's own attention within the budget."""
    quality: Quality | None = None
    """Quality of the output with the plan, on the prompts kept for acceptance if there are any."""
    speedup: Speedup | None = None
    """Measured speed-up of a run over the model's own attention."""
    rows: list[Row] = field(default_factory=list)
    """Rows of the recorded calls."""
    checks: list[ModelResult] = field(default_factory=list)
    """The model's own attention, and the plan, measured side by side."""
    is_undecided: bool = False
    """True if the machine was too busy to tell whether a plan is faster."""

    def __str__(self) -> str:
        return self.sentence
