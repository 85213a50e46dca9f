"""Speed-up and error of each kernel by layer."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence

from replay.report.charts.chart import Chart, Spec, chart, line_encoding, line_name, lines
from replay.report.charts.models import by_model
from replay.rows.row import Row

MOST_LABELS = 24
"""Maximum number of labels on the layer axis if the labels are not plain numbers."""


def layer_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield a line for each correct kernel: median speed-up and worst relative L1 of a layer's
    calls.

    Each combination of machine, model and phase with at least two replayed layers has a chart.
    """
    phases: dict[tuple[str, str, str], list[Row]] = {}
    for (device, model), members in by_model(rows).items():
        for row in members:
            phases.setdefault((device, model, row.call.phase), []).append(row)
    for (device, model, phase), members in phases.items():
        names, note = lines(members)
        shown = [row for row in members if row.is_correct and line_name(row) in names]
        modules = _in_order(shown)
        if len(modules) < 2:
            continue
        labels, pattern = layer_labels(modules)
        # Full paths would not fit below the axis.
        short = dict(zip(modules, labels, strict=True))
        baselines = {row.speedup.vs for row in shown if row.speedup}
        over = f" over {next(iter(baselines))}" if len(baselines) == 1 else ""
        width = max(320, min(16 * len(modules), 640))
        x = {
            "field": "layer",
            "type": "ordinal",
            "sort": labels,
            "title": f"layer ({pattern})" if pattern else "layer",
            "axis": _axis(labels),
        }
        spec = {
            "data": {"values": _values(shown, short, baselines)},
            "vconcat": [
                _panel("speedup", "speed-up", "linear", {**x, "axis": None}, names, width),
                _panel("relative_l1", "relative L1 error", "log", x, names, width),
            ],
            "spacing": 12,
        }
        below = [device, f"{phase}: median speed-up{over} and largest error of each layer", *note]
        name = ("layers", model, phase, device)
        yield chart(name, model, below, spec)


def _in_order(rows: Sequence[Row]) -> list[str]:
    """Return the modules of the rows: kinds of layers by their first call, then by their numbers.

    Sampled calls come from different steps, so they are not in the order of the layers.
    """
    kinds: dict[str, int] = {}
    for row in rows:
        kind, index = re.sub(r"\d+", "*", row.call.module), row.call.call_index
        kinds[kind] = min(index, kinds.get(kind, index))

    def place(module: str) -> tuple[int, str, list[int]]:
        kind = re.sub(r"\d+", "*", module)
        return kinds[kind], kind, list(map(int, re.findall(r"\d+", module)))

    return sorted({row.call.module for row in rows}, key=place)


def layer_labels(modules: Sequence[str]) -> tuple[list[str], str]:
    """Shorten paths to their differing parts, and return the common part as a pattern.

    `blocks.0.attn1` and `blocks.7.attn1` become `0` and `7`, with the pattern `blocks.*.attn1`.
    """
    paths = [module.split(".") for module in modules]
    shortest = min(map(len, paths))
    alike = [len({path[place] for path in paths}) == 1 for place in range(shortest)]
    head = alike.index(False) if False in alike else shortest - 1
    ends = [len({path[-1 - place] for path in paths}) == 1 for place in range(shortest - head)]
    tail = ends.index(False) if False in ends else 0
    labels = [".".join(path[head : len(path) - tail]) for path in paths]
    first = paths[0]
    rest = [*first[:head], "*", *first[len(first) - tail :]]
    return labels, ".".join(rest) if len(rest) > 1 else ""


def _axis(labels: Sequence[str]) -> Spec:
    """Describe the axis: numbers stay upright, and some of the longer labels are left out."""
    if max(map(len, labels)) < 4:
        return {"labelAngle": 0, "labelOverlap": "greedy"}
    shown = labels[:: math.ceil(len(labels) / MOST_LABELS)]
    return {"labelAngle": -45, "labelLimit": 160, "values": shown}


def _values(rows: Sequence[Row], short: dict[str, str], baselines: set[str]) -> list[Spec]:
    of_layer: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        of_layer.setdefault((short[row.call.module], line_name(row)), []).append(row)
    values = []
    for (layer, kernel), members in of_layer.items():
        ratios = [row.speedup.ratio for row in members if row.speedup]
        ratios += [1.0 for row in members if row.kernel in baselines]
        errors = [row.accuracy.reference.relative_l1 for row in members if row.accuracy]
        finite = [error for error in errors if math.isfinite(error) and error > 0]
        values.append(
            {
                "layer": layer,
                "kernel": kernel,
                "speedup": statistics.median(ratios) if ratios else None,
                "relative_l1": max(finite, default=None),
            }
        )
    return values


def _panel(field: str, title: str, scale: str, x: Spec, names: list[str], width: int) -> Spec:
    y: Spec = {"field": field, "type": "quantitative", "title": title}
    y["scale"] = {"type": scale, "zero": False}
    if scale == "log":
        y["axis"] = {"format": ".0e", "tickCount": 5}
    return {
        "width": width,
        "height": 150,
        "transform": [{"filter": {"field": field, "valid": True}}],
        "mark": {"type": "line", "point": {"filled": True, "size": 40}},
        "encoding": {"x": x, "y": y, **line_encoding(names, width)},
    }
