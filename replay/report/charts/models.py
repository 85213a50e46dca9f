"""Charts of each kernel's speed-up on a model's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture.text.printable import printable
from replay.report.charts.chart import CLASS_COLOURS, Chart, Spec, chart
from replay.report.groups import Group, group_rows, joined
from replay.report.pooled import pooled_speedup
from replay.report.ranking import is_correct
from replay.rows.row import Row


def model_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield charts with a bar for each correct kernel's speed-up and interval, the fastest first.

    Each pair of machine and model has a chart, with a panel for each kind of call. Figures are
    pooled over the paired rounds of all calls, as in the tables.
    """
    models: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kernel and row.call.phase != "synthetic":
            models.setdefault((row.machine.device, row.call.model), []).append(row)
    for (device, model), members in models.items():
        groups = [(group, values) for group in group_rows(members) if (values := _values(group))]
        if not groups:
            continue
        longest = max(value["high"] for _, values in groups for value in values)
        domain = [0, max(longest, 1) * 1.15]
        classes = {value["class"] for _, values in groups for value in values}
        shown = [name for name in CLASS_COLOURS if name in classes]
        colour = {
            "field": "class",
            "type": "nominal",
            "title": None,
            "scale": {"domain": list(CLASS_COLOURS), "range": list(CLASS_COLOURS.values())},
            "legend": {"orient": "bottom", "values": shown} if len(shown) > 1 else None,
        }
        spec = {
            "vconcat": [_panel(group, values, domain, colour) for group, values in groups],
            "spacing": 16,
            "resolve": {"scale": {"color": "shared"}},
        }
        below = [device, "speed-up of attention with its 95 % interval"]
        yield chart(("speedup", model, device), model, below, spec)


def _values(group: Group) -> list[Spec]:
    values = []
    for kernel in group.rows:
        if kernel.name == group.baseline or not is_correct(group, kernel):
            continue
        speedup = pooled_speedup(group, kernel)
        if speedup is None:
            continue
        values.append(
            {
                "kernel": printable(str(kernel)),
                "class": group.class_of(kernel),
                "ratio": speedup.ratio,
                "low": speedup.ratio if speedup.low is None else speedup.low,
                "high": speedup.ratio if speedup.high is None else speedup.high,
                "label": f"{speedup.ratio:.2f}×",
            }
        )
    return sorted(values, key=lambda value: -value["ratio"])


def _panel(group: Group, values: list[Spec], domain: list[float], colour: Spec) -> Spec:
    about = (group.phase, group.shape, group.dtype, group.mask, group.place, group.size)
    style = {"fontSize": 11, "fontWeight": "normal", "anchor": "start", "offset": 4}
    y = {
        "field": "kernel",
        "type": "nominal",
        "sort": [value["kernel"] for value in values],
        "title": None,
        "axis": {"ticks": False, "labelLimit": 260, "labelPadding": 6},
    }

    def x(field: str) -> Spec:
        title = f"speed-up over {printable(group.baseline)}"
        scale = {"domain": domain, "nice": False}
        return {"field": field, "type": "quantitative", "title": title, "scale": scale}

    return {
        "title": {"text": joined(*about), **style},
        "width": 300,
        "height": {"step": 17},
        "data": {"values": values},
        "layer": [
            {
                "mark": {"type": "bar", "size": 11},
                "encoding": {"x": x("ratio"), "y": y, "color": colour},
            },
            {
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#666666"},
                "encoding": {"x": {"datum": 1, "type": "quantitative"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.4},
                "encoding": {"x": x("low"), "x2": {"field": "high"}, "y": y},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 11},
                "encoding": {"x": x("high"), "y": y, "text": {"field": "label", "type": "nominal"}},
            },
        ],
    }
