"""Errors of caches by layer, the layers that a budget keeps in 16 bits, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import wrap
from typing import NamedTuple

from capture.text.counted import counted
from capture.text.printable import printable
from replay.accuracy.cache_formats import CacheFormat
from replay.diagnosis.cache_errors import CacheError
from replay.plan.plan import Budget
from replay.rows.meaning import floored

MOST_LAYERS = 10
"""Maximum number of layers in the table of layers."""
WIDTH = 100
"""Width of the printed sentences, in characters."""


class DecodeTime(NamedTuple):
    """Core times of two decode kernels of ours, over the calls that both ran."""

    kernel: str
    ms: float
    """Mean milliseconds of a call over a cache in the format."""
    bf16_ms: float
    """Mean milliseconds over a cache in 16 bits."""
    calls: int


@dataclass
class CacheErrors:
    """Errors of a run of `replay cache-formats`; print them for tables."""

    found: list[CacheError] = field(default_factory=list)
    formats: tuple[CacheFormat, ...] = ()
    budget: Budget | None = None
    """Largest error that a layer may have; None to choose no layers."""
    decode: dict[str, DecodeTime] = field(default_factory=dict)
    """Time by format, for formats with a kernel that ran; empty on a CPU."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reason why a call has no errors, by call."""
    unmeasured: list[str] = field(default_factory=list)
    """Layers that the model ran but whose errors are unknown."""
    note: str = ""
    """Warning about how the recording was read; usually empty."""

    @property
    def metric(self) -> str:
        """Metric of the tables: that of the budget, or `relative_l1`."""
        return "relative_l1" if self.budget is None else self.budget.metric

    def badness(self, figure: float) -> float:
        """Return a sort key that grows as the metric gets worse."""
        return (self.budget or Budget(self.metric, 0.0)).badness(figure)

    def worst(self, name: str) -> dict[str, float]:
        """Return the worst error of a call in a format by layer, in the order of the calls."""
        by_layer: dict[str, list[CacheError]] = {}
        for error in self.found:
            if error.format == name:
                by_layer.setdefault(error.layer, []).append(error)
        return {
            layer: max((getattr(error, self.metric) for error in errors), key=self.badness)
            for layer, errors in by_layer.items()
        }

    def kept(self, name: str) -> list[str]:
        """Return the layers to keep in 16 bits: their error in a format exceeds the budget."""
        if self.budget is None:
            return []
        return [layer for layer, error in self.worst(name).items() if not self.budget.holds(error)]

    def vllm_flags(self, name: str) -> str:
        """Return vLLM's flags for a format within the budget.

        vLLM's number of a layer is the only number in its path, as in `model.layers.3.self_attn`.
        The text is empty without a budget, if vLLM has no such format, if no layer is within the
        budget, or if the path of a layer to keep has not exactly one number.
        """
        dtype = next(each.vllm for each in self.formats if each.name == name)
        kept = self.kept(name)
        numbers = [[int(part) for part in layer.split(".") if part.isdigit()] for layer in kept]
        if not (dtype and self.budget) or len(kept) == len(self.worst(name)):
            return ""
        if any(len(of_layer) != 1 for of_layer in numbers):
            return ""
        skipped = " ".join(map(str, sorted({number for (number,) in numbers})))
        return f"--kv-cache-dtype {dtype}" + f" --kv-cache-dtype-skip-layers {skipped}" * bool(kept)

    def __str__(self) -> str:
        """Return the tables that `replay cache-formats` prints."""
        return "\n".join(_lines(self))


def _lines(errors: CacheErrors) -> Iterator[str]:
    """Yield the lines of the tables, and the flags for vLLM within a budget."""
    worst = {each.name: errors.worst(each.name) for each in errors.formats}
    if not errors.found:
        yield "no call has errors"
        return
    yield from _formats(errors, worst)
    yield ""
    yield from _layers(errors, worst)
    for sentence in _sentences(errors):
        yield from wrap(sentence, WIDTH, subsequent_indent="  ", break_long_words=False)
    yield from _flags(errors)


def _formats(errors: CacheErrors, worst: dict[str, dict[str, float]]) -> Iterator[str]:
    header = ["format", f"worst {errors.metric}", "worst layer"]
    header += ["decode"] * bool(errors.decode)
    header += [f"layers within {errors.budget}"] * (errors.budget is not None)
    rows = [header]
    for name, by_layer in worst.items():
        layer = max(by_layer, key=lambda layer: errors.badness(by_layer[layer]))
        row = [name, _figure(errors, by_layer[layer]), _named(layer)]
        if errors.decode:
            time = errors.decode.get(name)
            row.append("" if time is None else f"{time.ms:.4f} ms (16 bits: {time.bf16_ms:.4f})")
        if errors.budget is not None:
            row.append(f"{len(by_layer) - len(errors.kept(name))} of {len(by_layer)}")
        rows.append(row)
    yield from _table(rows)


def _layers(errors: CacheErrors, worst: dict[str, dict[str, float]]) -> Iterator[str]:
    parts = [name.split("-") for name in worst]
    rows = [["", *line] for line in zip_longest(*parts, fillvalue="")]
    layers = sorted(
        next(iter(worst.values())),
        key=lambda layer: max(errors.badness(of_format[layer]) for of_format in worst.values()),
        reverse=True,
    )
    for layer in layers[:MOST_LAYERS]:
        rows.append([_named(layer), *(_figure(errors, by[layer]) for by in worst.values())])
    yield from _table(rows)
    if len(layers) > MOST_LAYERS:
        yield f"and {counted(len(layers) - MOST_LAYERS, 'layer')} with smaller errors (see --json)"


def _sentences(errors: CacheErrors) -> Iterator[str]:
    yield (
        f"{errors.metric} of a layer's output in its worst call, not of the model's text: "
        "keys and values are rounded, all else is in float64."
    )
    if errors.unmeasured:
        number = counted(len(errors.unmeasured), "layer")
        yield (
            f"not recorded, so errors unknown: {number} of the model, such as "
            f"{_named(errors.unmeasured[0])}; record all with capture --max per-layer"
        )


def _flags(errors: CacheErrors) -> Iterator[str]:
    if errors.budget is None:
        return
    for each in errors.formats:
        kept = errors.kept(each.name)
        if flags := errors.vllm_flags(each.name):
            yield f"vLLM, {each.name}{each.needs and f' ({each.needs})'}: {flags}"
        elif 0 < len(kept) < len(errors.worst(each.name)):
            yield f"{each.name}, layers over the budget: {', '.join(map(_named, kept))}"


def _figure(errors: CacheErrors, figure: float) -> str:
    return floored(6)(figure) if errors.metric == "cosine" else f"{figure:.3g}"


def _named(layer: str) -> str:
    return printable(layer) or "(no layer)"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
