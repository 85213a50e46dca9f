"""Charts of TFLOPS against sequence length, as in the FlashAttention and SageAttention papers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from capture.text.printable import printable
from replay.report.charts.chart import COLOURS, Chart, Spec, chart
from replay.report.groups import first_few
from replay.rows.row import HERE, CallFacts, Row

PANEL_WIDTH = 210
"""Width of a panel and of a column of the legend, in pixels."""

MOST_LINES = len(COLOURS)
"""Maximum number of kernels in a chart."""


def sweep_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield charts with a line per kernel over the lengths of random calls (GB/s for decode calls).

    Each combination of machine, dtype and B×H has a chart, whose panels show each head_dim with and
    without causal masking. Bars reach from the 10th to the 90th percentile of a kernel's times.
    """
    sweeps: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.call.phase == "synthetic" and row.kernel:
            sweeps.setdefault(_sweep(row), []).append(row)
    for (device, model, dtype, heads, kind), members in sweeps.items():
        names, notes = _lines(members)
        shown = [row for row in members if row.is_ranked and _line_name(row) in names]
        lengths = sorted({row.call.shape.kv_len for row in shown})
        if len(lengths) < 2:
            continue
        is_decode = kind == "decode"
        unit = "GB/s" if is_decode else "TFLOPS"
        values = [_value(row, row.gb_per_s if is_decode else row.tflops) for row in shown]
        panels = sorted({(row.call.shape.head_dim, row.call.is_causal) for row in shown})
        x = {
            "field": "length",
            "type": "ordinal",
            "sort": list(map(_length, lengths)),
            "title": "keys" if is_decode else "sequence length",
            "axis": {"labelAngle": 0},
        }
        columns = min(2, len(panels))
        # Colour and shape share a legend, which lists the fastest kernel first.
        kernel = {
            "field": "kernel",
            "type": "nominal",
            "scale": {"domain": names},
            "legend": {"orient": "bottom", "columns": columns, "title": None},
        }
        spec = {
            "data": {"values": [value for value in values if value is not None]},
            "facet": {
                "field": "panel",
                "type": "nominal",
                "title": None,
                "sort": [_panel(head_dim, is_causal) for head_dim, is_causal in panels],
                "header": {"labelFontSize": 12, "labelFontWeight": "bold"},
            },
            "columns": columns,
            "spacing": 20,
            "spec": {
                "width": PANEL_WIDTH,
                "height": 160,
                "encoding": {"x": x, "color": kernel},
                "layer": [
                    {
                        "mark": {"type": "rule", "strokeWidth": 1.2},
                        "encoding": {"y": _y("low", unit), "y2": {"field": "high"}},
                    },
                    {
                        "mark": {"type": "line", "point": {"filled": True, "size": 45}},
                        "encoding": {"y": _y("value", unit), "shape": kernel},
                    },
                ],
            },
            "resolve": {"axis": {"x": "independent"}},
        }
        about = "one decoded token" if is_decode else "forward"
        below = [f"{model}, {about}, {dtype}, {heads}", *notes]
        yield chart(("sweep", model, kind, dtype, heads, device), device, below, spec)


def _sweep(row: Row) -> tuple[str, ...]:
    """Return the properties that all calls of a chart share."""
    shape = row.call.shape
    kv_heads = f"/{shape.kv_heads}" if shape.kv_heads != shape.q_heads else ""
    heads = f"B={shape.batch}, H={shape.q_heads}{kv_heads}"
    kind = "decode" if shape.q_len == 1 else ""
    return (row.machine.device, row.call.model, row.call.dtype, heads, kind)


def _lines(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the kernels to show, the fastest first, and notes on the others.

    Kernels are ranked by the median, over the calls, of their time relative to the fastest kernel.
    """
    baselines = {row.speedup.vs for row in rows if row.speedup}
    # Drop the baseline of other environments, which run it only to pair rounds with it.
    rows = [row for row in rows if row.environment == HERE or row.kernel not in baselines]
    wrong = list(dict.fromkeys(_line_name(row) for row in rows if row.status == "inaccurate"))
    timed = [
        (row, row.time_ms.p50)
        for row in rows
        if row.time_ms and row.is_ranked and _line_name(row) not in wrong
    ]
    best: dict[CallFacts, float] = {}
    for row, ms in timed:
        best[row.call] = min(ms, best.get(row.call, ms))
    slowness: dict[str, list[float]] = {}
    for row, ms in timed:
        slowness.setdefault(_line_name(row), []).append(ms / best[row.call])
    order = sorted(slowness, key=lambda name: statistics.median(slowness[name]))
    notes = [f"incorrect and not shown: {first_few(wrong, 2)}"] if wrong else []
    if len(order) > MOST_LINES:
        notes.append(f"the fastest {MOST_LINES} of {len(order)} correct kernels")
    return order[:MOST_LINES], notes


def _line_name(row: Row) -> str:
    """Return a name such as `sage2 (quantised)`, which omits the class of exact kernels."""
    is_exact = row.accuracy_class in ("exact", None)
    return printable(str(row.id) if is_exact else f"{row.id} ({row.accuracy_class})")


def _panel(head_dim: int, is_causal: bool) -> str:
    return f"head_dim {head_dim}, {'causal' if is_causal else 'not causal'}"


def _length(keys: int) -> str:
    """Format a number of keys, such as 8192 as `8k`."""
    return f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)


def _y(field: str, unit: str) -> Spec:
    return {"field": field, "type": "quantitative", "title": unit}


def _value(row: Row, figure: float | None) -> Spec | None:
    if figure is None or row.time_ms is None:
        return None
    return {
        "panel": _panel(row.call.shape.head_dim, row.call.is_causal),
        "kernel": _line_name(row),
        "length": _length(row.call.shape.kv_len),
        "value": figure,
        "low": figure * row.time_ms.p50 / row.time_ms.p90,
        "high": figure * row.time_ms.p50 / row.time_ms.p10,
    }
