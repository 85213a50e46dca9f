"""Plan, which names a kernel for each layer, and the error budget of the plan.

A layer is a module in a phase. If its calls differ in their key lengths, it may have a kernel for
each range of lengths (`replay.plan.key_lengths`), and in the phase `denoise` also for each range of
steps (`replay.plan.step_ranges`). `replay.plan.choose` makes plans, `replay.use_plan` applies them.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attention_replay.errors import Error, check_type
from capture.storage.json_data import parsed, shown, typed
from capture.storage.plain_files import possible
from replay.plan.key_lengths import (
    MOST_KEYS,
    KernelsByLength,
    KeyLengths,
    kernel_for,
    kernels_by_length,
    within_reach,
)
from replay.plan.measured import Measured
from replay.plan.step_ranges import (
    ALL_STEPS,
    MOST_STEPS,
    KernelsByStep,
    StepRange,
    kernels_by_step,
)
from replay.rows.meaning import COSINE_NOISE
from replay.rows.replacement import replacing, why_not_written
from replay.rows.row_files import plain, rebuilt

FORMAT = "attention-replay-plan/4"
READABLE = (FORMAT, "attention-replay-plan/3", "attention-replay-plan/2", "attention-replay-plan/1")
"""Formats that can be read. Format 2 has no ranges of steps, and format 1 none of lengths."""

METRICS = {"cosine": 0.998, "relative_l1": 0.05, "rmse": 0.01}
"""Metrics that a budget can limit, with example limits: a minimum for cosine, maxima otherwise."""

DENOISE = "denoise"
"""Phase whose calls belong to denoising steps (`capture.hooks.phases`)."""

HOW = "make one with `replay tune`, or with `replay plan --dir DIR --budget cosine=0.998`"


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
class TotalError:
    """Limit of the sum of the errors of a run's calls, and the plan's use of it."""

    limit: float
    error: float | None
    """Sum of `replay.plan.cells.error_energy` over the calls; None if every plan exceeds the limit,
    so that all layers keep the baseline."""
    gap: float | None
    """Largest share of the planned attention time that another plan within the limit could save."""

    def __post_init__(self) -> None:
        """Check the figures, which may come from a file.

        Raises:
            ValueError: a figure is not finite, or is negative.
        """
        for name, figure in vars(self).items():
            if figure is not None and not 0 <= figure < math.inf:
                raise ValueError(f"{name} of the total error is {figure} (must be at least 0)")


@dataclass(frozen=True)
class LayerChoice:
    """Choice of a plan for one layer, or for a range of its key lengths or steps."""

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
    steps: StepRange | None = None
    """Denoising steps of the calls; None for all steps."""
    has_window: bool | None = None
    """True if the layer of an inference engine has a sliding window; None if that is not known, as
    in older plans and for other models."""
    others: dict[str, float] = field(default_factory=dict)
    """Time in ms that each other exact kernel saves per run, if it may run here: it is within the
    budget or, if no call of the layer was replayed, right on the calls that represent it. Empty in
    older plans."""

    def __post_init__(self) -> None:
        """Check the figures and ranges, which may come from a file.

        Raises:
            ValueError: a figure is not finite, a number or a range is out of its bounds, or steps
                are named in another phase than `denoise`.
        """
        figures = {name: getattr(self, name) for name in ("time_ms", "baseline_ms", "saved_ms")}
        for name, figure in (*figures.items(), *self.others.items()):
            if figure is not None and not math.isfinite(figure):
                raise ValueError(f"{name} of {self.module} is {figure}, not a finite number")
        if min(self.calls, self.captured) < 0:
            raise ValueError(f"{self.module} has a negative number of calls")
        _check_range("kv_lens", self.kv_lens, MOST_KEYS)
        _check_range("steps", self.steps, MOST_STEPS - 1)
        if self.steps is not None and self.phase != DENOISE:
            raise ValueError(f"only the phase {DENOISE} has steps, not {self.phase}")


def _check_range(name: str, ends: tuple[int, int] | None, most: int) -> None:
    if ends is not None and not 0 <= ends[0] <= ends[1] <= most:
        raise ValueError(f"{name} {ends[0]} to {ends[1]} is not a range within 0 to {most}")


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
    total_error: TotalError | None = None
    measured: Measured | None = None
    """Speed and quality of the model with the plan; None if the plan was not tuned."""

    def kernel_at(self, module: str, phase: str, kv_len: int, step: int) -> str:
        """Return the name of the kernel for a layer's calls of a key length at a step.

        The step, from 0, counts only if the layer's choices name steps. The baseline runs at steps
        that they do not name.
        """
        kernels = self.by_module.get(module, {}).get(phase, ())
        if isinstance(kernels, KernelsByStep):
            kernels = kernels.at(step)
        return kernel_for(kv_len, kernels) if kernels else self.baseline

    @functools.cached_property
    def by_module(self) -> Mapping[str, Mapping[str, KernelsByLength | KernelsByStep]]:
        """Kernels by module and phase.

        Raises:
            ValueError: two choices are for the same lengths and steps of a layer.
        """
        layers: dict[tuple[str, str], list[LayerChoice]] = {}
        for each in self.choices:
            layers.setdefault((each.module, each.phase), []).append(each)
        found: dict[str, dict[str, KernelsByLength | KernelsByStep]] = {}
        for (module, phase), choices in layers.items():
            found.setdefault(module, {})[phase] = _kernels_of(choices)
        return found

    @property
    def kv_lens(self) -> list[KeyLengths]:
        """Key lengths that the plan was made for; empty if it does not name any."""
        named = [each.kv_lens for each in self.choices if each.kv_lens is not None]
        return within_reach(named) if len(named) == len(self.choices) else []

    @property
    def steps(self) -> StepRange | None:
        """Steps from the first to the last that a choice names; None if no choice names any."""
        named = [each.steps for each in self.choices if each.steps is not None]
        if not named:
            return None
        return StepRange(min(steps.first for steps in named), max(steps.last for steps in named))

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
    def limits(self) -> str:
        """Limits of the plan's errors, e.g. `cosine ≥ 0.998, total error ≤ 0.1`."""
        total = "" if self.total_error is None else f", total error ≤ {self.total_error.limit:g}"
        return f"{self.budget}{total}"

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
            "total_error": None if self.total_error is None else asdict(self.total_error),
            "measured": None if self.measured is None else asdict(self.measured),
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
            TypeError: `path` is neither a text nor a path.
        """
        check_type("plan", path, (str, os.PathLike), "a Plan or the path of its file")
        try:
            data = parsed(possible(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path} ({error.strerror}): {HOW}") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a plan (not valid JSON): {HOW}") from error
        if not isinstance(data, dict) or data.get("format") not in READABLE:
            found = data.get("format") if isinstance(data, dict) else None
            raise PlanError(f"{path} is not a plan (format {shown(found)}, not {FORMAT!r}): {HOW}")
        try:
            ((metric, limit),) = data["budget"].items()
            total = data.get("total_error")
            measured = typed(dict[str, Any] | None, data.get("measured"), "measured")
            plan = cls(
                typed(str, data["model"], "model"),
                typed(str, data["weights"], "weights"),
                parse_budget(f"{metric}={limit}"),
                typed(str, data["baseline"], "baseline"),
                [rebuilt(LayerChoice, choice) for choice in data["choices"]],
                typed(dict[str, str], data["left_out"], "left_out"),
                typed(str, data["device"], "device"),
                None if total is None else rebuilt(TotalError, total),
                None if measured is None else rebuilt(Measured, measured),
            )
            plan.by_module  # noqa: B018 - raises if ranges overlap
        except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
            raise PlanError(f"the plan {path} is damaged ({error}): {HOW}") from error
        return plan


def _kernels_of(choices: Sequence[LayerChoice]) -> KernelsByLength | KernelsByStep:
    """Return the kernels of one layer."""
    kernels = [(each.kv_lens or KeyLengths(0, 0), each.kernel) for each in choices]
    if all(each.steps is None for each in choices):
        return kernels_by_length(kernels)
    return kernels_by_step(
        (each.steps or ALL_STEPS, *kernel) for each, kernel in zip(choices, kernels, strict=True)
    )
