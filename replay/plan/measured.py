"""Speed and quality that a tuning measured when the model ran with a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from capture.text.printable import printable
from replay.rows.row import Speedup

MOST_RUNS = 1_000_000
"""Largest number of runs that a quality can be judged on."""
LARGEST = 1e6
"""Largest speed-up that a plan can have."""


@dataclass(frozen=True)
class Measured:
    """Speed and quality of a model with a plan, and the conditions that they were measured in."""

    metric: str
    """Metric of the final output that the tuning limited, such as `psnr`."""
    limit: float
    """The quality budget: a least or a largest figure of the metric."""
    worst: float | None
    """Worst figure over the runs; None for an infinite PSNR, of identical outputs."""
    mean: float | None
    """Mean figure over the runs; None if it is infinite."""
    runs: int
    """Number of prompts, or of windows of a text, that the figures are from."""
    kept: bool
    """True if the search did not use these runs; False if the plan was tuned on them."""
    speedup: Speedup
    """Speed-up of a run over the model's own attention."""
    conditions: dict[str, str] = field(default_factory=dict)
    """Model, lengths, device and versions by name (`replay.tune.conditions`)."""

    def __post_init__(self) -> None:
        """Check the figures, which may come from a file.

        Raises:
            ValueError: a figure is not finite or out of its bounds.
        """
        for name, figure in (("limit", self.limit), ("worst", self.worst), ("mean", self.mean)):
            if figure is not None and not math.isfinite(figure):
                raise ValueError(f"{name} of the measured quality is {figure}, not finite")
        for end in (self.speedup.ratio, self.speedup.low, self.speedup.high):
            if end is not None and not 0 < end <= LARGEST:
                raise ValueError(f"the measured speed-up has {end}, not at most {LARGEST:g}")
        if not 1 <= self.runs <= MOST_RUNS:
            raise ValueError(f"the quality is measured on {self.runs} runs, not 1 to {MOST_RUNS}")

    def __str__(self) -> str:
        """Format as `1.14× (1.13-1.15) at psnr 38.1 (mean 39), on 2 runs kept for acceptance`."""
        low, high = self.speedup.low, self.speedup.high
        interval = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
        worst, mean = ("∞" if each is None else f"{each:.6g}" for each in (self.worst, self.mean))
        several = f" (mean {mean})" if self.runs > 1 else ""
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        judged = f"{runs} kept for acceptance" if self.kept else "the run it was tuned on"
        metric = printable(self.metric)
        return f"{self.speedup.ratio:.2f}×{interval} at {metric} {worst}{several}, on {judged}"
