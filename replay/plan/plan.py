"""Plan, which names a kernel for each layer, and the error budget of the plan.

A layer is a module in a phase. If its calls differ in their key lengths, it may have a kernel for
each range of lengths (`replay.plan.key_lengths`). `replay.plan.choose` makes plans,
`replay.use_plan` applies them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attention_replay.errors import Error
from capture.storage.json_data import parsed, shown
from replay.plan.key_lengths import (
    KernelsByLength,
    KeyLengths,
    kernel_for,
    kernels_by_length,
    within_reach,
)
from replay.rows.meaning import COSINE_NOISE
from replay.rows.replacement import replacing, why_not_written
from replay.rows.row_files import plain, rebuilt

FORMAT = "attention-replay-plan/2"
READABLE = (FORMAT, "attention-replay-plan/1")
"""Formats that can be read. In format 1, a layer has one kernel for all lengths."""

METRICS = {"cosine": 0.998, "relative_l1": 0.05, "rmse": 0.01}
"""Metrics that a budget can limit, with example limits: a minimum for cosine, maxima otherwise."""

HOW = "make one with `replay plan --dir DIR --budget cosine=0.998`"


class PlanError(Error):
    """Reason why a budget or a plan cannot be used; the message gives the remedy."""


@dataclass(frozen=True)
class Budget:
    """Limit of one metric for an output's error relative to the reference."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.metric == 'cosine' else '≤'} {self.limit:g}"

    def holds(self, figure: float) -> bool:
        """Return True if a value of the metric is within the budget; always False for NaN."""
        if self.metric == "cosine":
            return figure + COSINE_NOISE >= self.limit
        return figure <= self.limit

    def badness(self, figure: float) -> float:
        """Return a sort key that grows as the value gets worse; NaN is worst."""
        if math.isnan(figure):
            return math.inf
        return -figure if self.metric == "cosine" else figure


def parse_budget(text: str) -> Budget:
    """Parse a budget such as `cosine=0.998`.

    Raises:
        PlanError: the metric is unknown, the limit is not a number in the metric's range, or there
            are several limits.
    """
    if text.count("=") > 1:
        raise PlanError(f"a budget is one limit, not several as in {text}: give one of them")
    metric, _, limit = (part.strip() for part in text.partition("="))
    if metric not in METRICS:
        raise PlanError(
            f"unknown metric {metric!r} in the budget: choose from {', '.join(METRICS)}, "
            "e.g. cosine=0.998"
        )
    if not limit:
        raise PlanError(f"{metric} has no limit: write the budget as {metric}={METRICS[metric]}")
    try:
        value = float(limit)
    except ValueError as error:
        raise PlanError(
            f"{limit!r} is not a number: write the budget as {metric}={METRICS[metric]}"
        ) from error
    low, high = (-1.0, 1.0) if metric == "cosine" else (0.0, math.inf)
    if not (math.isfinite(value) and low <= value <= high):
        valid = "between -1 and 1" if metric == "cosine" else "finite and not negative"
        raise PlanError(f"{metric}={limit} is out of range: {metric} must be {valid}")
    return Budget(metric, value)


@dataclass(frozen=True)
class Worst:
    """Worst value of each metric over a layer's recorded calls; NaN is worst."""

    cosine: float
    relative_l1: float
    rmse: float

    def of(self, metric: str) -> float:
        """Return the value of one of `METRICS`."""
        return float(getattr(self, metric))


@dataclass(frozen=True)
class LayerChoice:
    """Choice of a plan for one layer, or for a range of its key lengths."""

    module: str
    phase: str
    kernel: str
    covered: bool
    """True if a call of this layer was replayed; otherwise the layer keeps the baseline."""
    inside: bool
    """True if the chosen kernel is within the budget; False if no kernel is."""
    worst: Worst | None
    time_ms: float | None
    baseline_ms: float | None
    saved_ms: float
    """Predicted time saved per run."""
    calls: int
    """Number of calls per run of the model."""
    captured: int
    """Number of the layer's calls that were recorded and replayed."""
    kv_lens: KeyLengths | None = None
    """Key lengths of the calls; None in plans of format 1, and without calls."""
    baseline: str = ""
    """Kernel that the model itself runs at this layer; empty if it is the plan's baseline."""


@dataclass(frozen=True)
class Plan:
    """Kernel for every layer; modules that the plan does not name keep the baseline."""

    model: str
    weights: str
    budget: Budget
    baseline: str
    """Kernel of plain SDPA, which a model runs unless a layer's choice names another baseline."""
    choices: list[LayerChoice] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Kernels rejected although they were the fastest at some layer, with the reasons."""
    device: str = ""
    """Type of device that the plan was measured on (`replay.plan.plan_device`), or empty."""

    def kernel_at(self, module: str, phase: str, kv_len: int) -> str:
        """Return the name of the kernel for a layer's calls of a key length."""
        kernels = self.by_module.get(module, {}).get(phase)
        return kernel_for(kv_len, kernels) if kernels else self.baseline

    @functools.cached_property
    def by_module(self) -> Mapping[str, Mapping[str, KernelsByLength]]:
        """Kernels by module and phase.

        Raises:
            ValueError: two choices are for the same lengths of a layer.
        """
        layers: dict[tuple[str, str], list[tuple[KeyLengths, str]]] = {}
        for each in self.choices:
            lengths = each.kv_lens or KeyLengths(0, 0)
            layers.setdefault((each.module, each.phase), []).append((lengths, each.kernel))
        found: dict[str, dict[str, KernelsByLength]] = {}
        for (module, phase), kernels in layers.items():
            found.setdefault(module, {})[phase] = kernels_by_length(kernels)
        return found

    @property
    def kv_lens(self) -> list[KeyLengths]:
        """Key lengths that the plan was made for; empty if it does not name any."""
        named = [each.kv_lens for each in self.choices if each.kv_lens is not None]
        return within_reach(named) if len(named) == len(self.choices) else []

    @property
    def kernels(self) -> list[str]:
        """Return the names of the plan's kernels, without each layer's baseline."""
        used = dict.fromkeys(
            choice.kernel
            for choice in self.choices
            if choice.kernel != (choice.baseline or self.baseline)
        )
        return list(used)

    @property
    def code(self) -> list[str]:
        """Return the plan's kernels (or baseline) that are named `file.py:function`."""
        named = dict.fromkeys([self.baseline, *(choice.kernel for choice in self.choices)])
        return [kernel for kernel in named if ".py:" in kernel]

    @property
    def saved_ms(self) -> float:
        """Return the predicted time saved per run."""
        return sum(choice.saved_ms for choice in self.choices)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, in one step (`replay.rows.replacement`).

        Raises:
            PlanError: the file cannot be written.
        """
        data = {
            "format": FORMAT,
            "model": self.model,
            "weights": self.weights,
            "device": self.device,
            "budget": {self.budget.metric: self.budget.limit},
            "baseline": self.baseline,
            "saved_ms": self.saved_ms,
            "left_out": self.left_out,
            "choices": [asdict(choice) for choice in self.choices],
        }
        try:
            with replacing(Path(path)) as file:
                file.write(json.dumps(plain(data), indent=1))
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}: {why_not_written(error)}") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the file does not exist, or is not a plan that this version can read.
        """
        try:
            data = parsed(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path} ({error.strerror}): {HOW}") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a plan (not valid JSON): {HOW}") from error
        if not isinstance(data, dict) or data.get("format") not in READABLE:
            found = data.get("format") if isinstance(data, dict) else None
            raise PlanError(f"{path} is not a plan (format {shown(found)}, not {FORMAT!r}): {HOW}")
        try:
            ((metric, limit),) = data["budget"].items()
            plan = cls(
                data["model"],
                data["weights"],
                parse_budget(f"{metric}={limit}"),
                data["baseline"],
                [rebuilt(LayerChoice, choice) for choice in data["choices"]],
                dict(data["left_out"]),
                data["device"],
            )
            plan.by_module  # noqa: B018 - raises if ranges overlap
        except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
            raise PlanError(f"the plan {path} is damaged ({error}): {HOW}") from error
        # Names are passed on to kernels and modules, so refuse a plan whose names are not strings.
        names = [
            (plan.baseline, plan.device),
            *((each.module, each.phase, each.kernel, each.baseline) for each in plan.choices),
        ]
        if not all(isinstance(name, str) for each in names for name in each):
            raise PlanError(f"the plan {path} is damaged (a name is not a string): {HOW}")
        return plan
