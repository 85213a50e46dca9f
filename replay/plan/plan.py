"""A plan: which kernel to use at which layer, and how far from the reference its outputs may be.

A layer is a module in a phase. `replay.plan.choose` makes plans, `replay.use_plan` follows them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attention_replay import Error
from replay.rows.files import rebuilt
from replay.rows.meaning import COSINE_NOISE

FORMAT = "attention-replay-plan/1"

METRICS = {"cosine": 0.998, "relative_l1": 0.05, "rmse": 0.01}
"""What a budget can limit (`replay.rows.row.Errors`), each with an example: cosine from below, the
others from above."""

HOW = "make one with `replay --dir DIR --plan FILE --budget cosine=0.998`"


class PlanError(Error):
    """A budget or a plan that cannot be used: one sentence that names the remedy."""


@dataclass(frozen=True)
class Budget:
    """How far from the reference an output may be."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.metric == 'cosine' else '≤'} {self.limit:g}"

    def holds(self, figure: float) -> bool:
        """Whether a figure of the metric is inside; NaN never is."""
        if self.metric == "cosine":
            return figure + COSINE_NOISE >= self.limit
        return figure <= self.limit

    def badness(self, figure: float) -> float:
        """Grows as a figure gets worse; NaN is worst."""
        if math.isnan(figure):
            return math.inf
        return -figure if self.metric == "cosine" else figure


def parse_budget(text: str) -> Budget:
    """The budget of `cosine=0.998`.

    Raises:
        PlanError: an unknown metric, no number, or one that the metric never has.
    """
    metric, _, limit = (part.strip() for part in text.partition("="))
    if metric not in METRICS:
        raise PlanError(
            f"no metric {metric!r} to budget: choose from {', '.join(METRICS)}, as in cosine=0.998"
        )
    try:
        value = float(limit)
    except ValueError as error:
        raise PlanError(
            f"{limit!r} is no number: write the budget as {metric}={METRICS[metric]}"
        ) from error
    low, high = (-1.0, 1.0) if metric == "cosine" else (0.0, math.inf)
    if not (math.isfinite(value) and low <= value <= high):
        between = "-1 and 1" if metric == "cosine" else "0 and any finite number"
        raise PlanError(f"{metric}={limit} allows nothing: {metric} lies between {between}")
    return Budget(metric, value)


@dataclass(frozen=True)
class Worst:
    """The worst of each metric over a layer's recorded calls; NaN is worst of all."""

    cosine: float
    relative_l1: float
    rmse: float

    def of(self, metric: str) -> float:
        """The figure of one of `METRICS`."""
        return float(getattr(self, metric))


@dataclass(frozen=True)
class Choice:
    """What a plan has chosen for one layer."""

    module: str
    phase: str
    kernel: str
    covered: bool
    """Whether a call of this very layer was replayed; otherwise it keeps the baseline."""
    inside: bool
    """Whether the budget holds here; false where no kernel, nor the baseline, is inside."""
    worst: Worst | None
    time_ms: float | None
    baseline_ms: float | None
    saved_ms: float
    """In one run, predicted."""
    calls: int
    """In one run."""
    captured: int
    """How many of them were recorded and replayed."""


@dataclass(frozen=True)
class Plan:
    """A kernel for every layer; modules that it does not name keep the baseline."""

    model: str
    weights: str
    budget: Budget
    baseline: str
    choices: list[Choice] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Kernels that would have been chosen somewhere, with the reason why they were not."""

    def kernel_at(self, module: str, phase: str) -> str:
        """The kernel of a layer: `replay.end_to_end.prediction.predict` takes this function."""
        for choice in self.choices:
            if (choice.module, choice.phase) == (module, phase):
                return choice.kernel
        return self.baseline

    @property
    def kernels(self) -> list[str]:
        """The kernels it uses besides the baseline."""
        used = dict.fromkeys(choice.kernel for choice in self.choices)
        return [kernel for kernel in used if kernel != self.baseline]

    @property
    def saved_ms(self) -> float:
        """In one run, predicted."""
        return sum(choice.saved_ms for choice in self.choices)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, in one step.

        Raises:
            PlanError: the file cannot be written.
        """
        path = Path(path)
        data = {
            "format": FORMAT,
            "model": self.model,
            "weights": self.weights,
            "budget": {self.budget.metric: self.budget.limit},
            "baseline": self.baseline,
            "saved_ms": self.saved_ms,
            "left_out": self.left_out,
            "choices": [_without_nan(asdict(choice)) for choice in self.choices],
        }
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_text(json.dumps(data, indent=1))
            os.replace(temporary, path)
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: there is no such file, or it is not a plan that this version reads.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise PlanError(f"cannot read the plan {path} ({error.strerror}): {HOW}") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a plan, nor any JSON: {HOW}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise PlanError(f"{path} is not a plan (format {found!r}, not {FORMAT!r}): {HOW}")
        try:
            ((metric, limit),) = data["budget"].items()
            plan = cls(
                data["model"],
                data["weights"],
                parse_budget(f"{metric}={limit}"),
                data["baseline"],
                [rebuilt(Choice, choice) for choice in data["choices"]],
                dict(data["left_out"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
            raise PlanError(f"the plan {path} is damaged ({error}): {HOW}") from error
        names = [
            (plan.baseline,),
            *((each.module, each.phase, each.kernel) for each in plan.choices),
        ]
        if not all(isinstance(name, str) for each in names for name in each):
            raise PlanError(f"the plan {path} is damaged (a name is no text): {HOW}")
        return plan


def _without_nan(value: Any) -> Any:
    """Plain JSON, which knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
