"""Quality of a run's final output, and the budget that limits its loss.

The figures are those of `replay.end_to_end.drift`, between a run with a plan and one with the
model's own attention. A budget must hold for every prompt, so it limits the worst figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attention_replay.errors import Error, check_type
from replay.end_to_end import drift
from replay.end_to_end.drift import Outputs
from replay.plan.key_lengths import KeyLengths


class QualityError(Error):
    """Reason why a quality budget cannot be used; the message gives the remedy."""


class _Metric(NamedTuple):
    title: str
    unit: str
    example: float
    """Example limit."""
    low: float
    high: float
    """Range of valid limits."""
    is_minimum: bool
    """True if the limit is a minimum."""
    needs: str
    """Result that the metric needs."""


PICTURES = (
    "pictures or frames with values in [0, 1], as tensors (…, C, H, W), arrays (…, H, W, C) or PIL "
    "pictures"
)
LOGITS = 'the logits of a text, {"input_ids": …, "logits": …}'

METRICS = {
    "psnr": _Metric("PSNR", " dB", 35, 0.0, math.inf, True, PICTURES),
    "ssim": _Metric("SSIM", "", 0.95, -1.0, 1.0, True, f"{PICTURES}, of at least 11×11 pixels"),
    "cosine": _Metric("cosine", "", 0.99, -1.0, 1.0, True, "a tensor, pictures or logits"),
    "relative_l1": _Metric(
        "relative L1", "", 0.05, 0.0, math.inf, False, "a tensor, pictures or logits"
    ),
    "kl": _Metric("KL", " nats", 0.01, 0.0, math.inf, False, f"{LOGITS} or of generated tokens"),
    "top1": _Metric("top-1", "", 0.98, 0.0, 1.0, True, f"{LOGITS}, tokens or a text"),
    "perplexity": _Metric("perplexity ratio", "", 1.01, 0.0, math.inf, False, LOGITS),
}
"""Metrics of quality. `kl` is in nats per token. `top1` is the share of a text's positions where
both runs rank the same token first; for generated tokens and texts, the share before the first
difference. `perplexity` is relative to the perplexity of the model's own attention."""

CONFIDENCE = 0.975
"""Share of other prompts for which the expected figure, or a better one, is foretold."""

LEAST_PROMPTS = 4
"""Smallest number of prompts from which a figure is foretold."""

BEST_PSNR = 100.0
"""Smallest PSNR in dB that stands for equal pictures in a mean."""


@dataclass(frozen=True)
class QualityBudget:
    """Limit of one metric of the final output."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}={self.limit:g}"

    def holds(self, figure: float) -> bool:
        """Return True if a figure is within the budget; always False for NaN."""
        return figure >= self.limit if METRICS[self.metric].is_minimum else figure <= self.limit

    def worst(self, figures: Sequence[float]) -> float:
        """Return the worst of the figures; NaN is worst."""
        if any(map(math.isnan, figures)):
            return math.nan
        return min(figures) if METRICS[self.metric].is_minimum else max(figures)

    def figure(self, baseline: Outputs, outputs: Outputs) -> float:
        """Return the metric between the outputs of two runs; NaN if the second has NaN.

        Raises:
            QualityError: the metric cannot be computed from such outputs.
        """
        try:
            found = drift.compare(baseline, outputs)
        except ValueError as error:
            raise QualityError(f"the output with a plan cannot be judged: {error}") from error
        figure = _read(self.metric, found, baseline)
        if figure is None:
            known = [name for name in METRICS if _read(name, found, baseline) is not None]
            raise QualityError(
                f"{self.metric} cannot be computed from {_described(baseline)}: choose "
                f"{' or '.join(known)}, or let run() return {METRICS[self.metric].needs}"
            )
        return math.nan if found["nan_count"] else figure

    def foretold(self, figures: Sequence[float]) -> float:
        """Return the worst figure to expect of another prompt, with the probability `CONFIDENCE`.

        This is the one-sided prediction limit of a normal distribution, mean ± t s √(1 + 1/n).
        """
        best = max(BEST_PSNR, self.limit)
        figures = [best if each == math.inf else each for each in figures]
        number = len(figures)
        margin = _student(CONFIDENCE, number - 1) * math.sqrt(1 + 1 / number)
        margin *= statistics.stdev(figures)
        mean = statistics.fmean(figures)
        return mean - margin if METRICS[self.metric].is_minimum else mean + margin

    def shown(self, figure: float) -> str:
        """Format a figure such as `PSNR 38.1 dB`."""
        metric = METRICS[self.metric]
        return f"{metric.title} {self.digits(figure)}{metric.unit}"

    def digits(self, figure: float) -> str:
        """Format a figure without its name and unit."""
        if figure == math.inf:
            return "∞"
        if self.metric == "psnr":
            return f"{figure:.1f}"
        # Figures close to 1 need more digits.
        return f"{figure:.6g}" if METRICS[self.metric].is_minimum else f"{figure:.4g}"


@dataclass(frozen=True)
class Quality:
    """Quality of a plan's output over the prompts."""

    budget: QualityBudget
    figures: tuple[float, ...]
    """Figure of each prompt."""
    searched: tuple[float, ...] = ()
    """Figures of the prompts that served for the search, if these are others."""
    other_lengths: KeyLengths | None = None
    """Key lengths in these runs that the plan was not made for."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.figures)

    @property
    def worst(self) -> float:
        return self.budget.worst(self.figures)

    @property
    def foretold(self) -> float | None:
        """Worst figure to expect of other prompts; None with fewer than `LEAST_PROMPTS`."""
        figures = [*self.searched, *self.figures]
        if len(figures) < LEAST_PROMPTS or any(map(math.isnan, figures)):
            return None
        return self.budget.foretold(figures)

    @property
    def holds(self) -> bool:
        """Return True if the budget holds for every prompt."""
        return self.budget.holds(self.worst)

    @property
    def is_safe(self) -> bool:
        """Return True if the budget holds for every prompt, and is expected to for others."""
        return self.holds and (self.foretold is None or self.budget.holds(self.foretold))

    def __str__(self) -> str:
        if len(self.figures) == 1:
            return self.budget.shown(self.worst)
        others = ""
        if self.searched and self.foretold is not None:
            others = f", {self.budget.digits(self.foretold)} or better expected on other prompts"
        mean = self.budget.digits(self.mean)
        return f"{self.budget.shown(self.worst)} (mean {mean}{others})"


def parse_quality(text: str) -> QualityBudget:
    """Parse a quality budget such as `psnr=35`.

    Raises:
        QualityError: the metric is unknown, or the limit is missing or out of range.
        TypeError: `text` is not a text.
    """
    check_type("quality", text, (str,), "a text such as 'psnr=35'")
    name, _, limit = (part.strip() for part in text.partition("="))
    metric = METRICS.get(name)
    if metric is None:
        raise QualityError(
            f"unknown quality metric {name!r}: choose from {', '.join(METRICS)}, e.g. psnr=35"
        )
    try:
        value = float(limit)
    except ValueError as error:
        raise QualityError(
            f"{name} has no numeric limit: write it as {name}={metric.example:g}"
        ) from error
    if not (math.isfinite(value) and metric.low <= value <= metric.high):
        high = "" if math.isinf(metric.high) else f" to {metric.high:g}"
        start = f"{metric.low:g}{high}" if high else f"at least {metric.low:g}"
        raise QualityError(f"{name}={limit} is out of range: expected {start}")
    return QualityBudget(name, value)


def _described(outputs: Outputs) -> str:
    """Name outputs with their shapes, and the ranges of values that may be no pictures."""
    parts = []
    for name, tensor in outputs.items():
        part = f"{name} {tuple(tensor.shape)}"
        if tensor.is_floating_point() and tensor.numel():
            part += f" with values from {float(tensor.min()):.3g} to {float(tensor.max()):.3g}"
        parts.append(part)
    return " and ".join(parts)


def _read(metric: str, found: drift.Drift, baseline: Outputs) -> float | None:
    """Return a metric's figure, NaN if it is not a number, or None if it was not computed."""
    if metric == "psnr" and found.get("frame_mse") == 0:
        return math.inf  # a drift has None for infinity
    if metric == "top1":
        return _top1(found, baseline)
    if metric == "perplexity":
        ours, theirs = found.get("baseline_perplexity"), found.get("perplexity")
        if "perplexity" not in found:
            return None
        return math.nan if not ours or theirs is None else theirs / ours
    names = {"kl": ("kl", "generated_kl")}.get(metric, (metric,))
    name = next((name for name in names if name in found), None)
    if name is None:
        return None
    value = found[name]
    return math.nan if value is None else float(value)


def _top1(found: drift.Drift, baseline: Outputs) -> float | None:
    if "top1_agreement" in found:
        agreed = found["top1_agreement"]
        return math.nan if agreed is None else float(agreed)
    if "first_diverging_token" not in found:
        return None
    index = found["first_diverging_token"]
    tokens = found.get("generated_tokens") or baseline["sequences"].shape[1]
    return 1.0 if index is None else index / max(tokens, 1)


def _student(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, within 1 % from 3 degrees of freedom.

    Cornish-Fisher expansion, Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
