"""TFLOPS against sequence length, as in the papers of FlashAttention and SageAttention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replay.report.charts.chart import Chart, Spec, chart, line_encoding, line_name, lines
from replay.rows.row import CallFacts, Row

PANEL_WIDTH = 210


def sweep_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield a line for each kernel on random calls of several lengths; decoding is shown in GB/s.

    Each combination of machine, dtype and B×H has a chart, with panels for each head_dim, causal
    and non-causal. Bars reach from the 10th to the 90th percentile of a kernel's times.
    """
    sweeps: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.call.phase == "synthetic" and row.kernel:
            sweeps.setdefault(_sweep(row), []).append(row)
    for (device, model, dtype, heads, kind), members in sweeps.items():
        names, note = lines(members)
        shown = [row for row in members if row.is_correct and line_name(row) in names]
        lengths = sorted({row.call.shape.kv_len for row in shown})
        if len(lengths) < 2:
            continue
        is_decode = kind == "decode"
        values = [_value(row, row.gb_per_s if is_decode else row.tflops) for row in shown]
        panels = sorted({(_head_dim(row.call), row.call.is_causal) for row in shown})
        x = {
            "field": "length",
            "type": "ordinal",
            "sort": list(map(_length, lengths)),
            "title": "keys" if is_decode else "sequence length",
            "axis": {"labelAngle": 0},
        }
        width = PANEL_WIDTH * min(2, len(panels))
        # Both panels share one legend.
        colour, shape = line_encoding(names, width).values()
        spec = {
            "data": {"values": [value for value in values if value is not None]},
            "facet": {
                "field": "panel",
                "type": "nominal",
                "title": None,
                "sort": [_panel(head_dim, is_causal) for head_dim, is_causal in panels],
                "header": {"labelFontSize": 12, "labelFontWeight": "bold"},
            },
            "columns": 2,
            "spacing": 20,
            "spec": {
                "width": PANEL_WIDTH,
                "height": 160,
                "layer": _layers(x, "GB/s" if is_decode else "TFLOPS", colour, shape),
            },
            "resolve": {"axis": {"x": "independent"}},
        }
        about = "one decoded token" if is_decode else "forward"
        below = [f"{model}, {about}, {dtype}, {heads}", *note]
        name = ("sweep", model, kind, dtype, heads, device)
        yield chart(name, device, below, spec)


def _sweep(row: Row) -> tuple[str, ...]:
    """Return the properties that all calls of a chart share."""
    call = row.call
    batch, heads, kv_heads = call.shape.batch, call.shape.q_heads, call.shape.kv_heads
    shared = f"B={batch}, H={heads}" + (f"/{kv_heads}" if kv_heads != heads else "")
    kind = "decode" if call.shape.q_len == 1 else ""
    return (row.machine.device, call.model, call.dtype, shared, kind)


def _head_dim(call: CallFacts) -> int:
    return call.shape.head_dim


def _panel(head_dim: int, is_causal: bool) -> str:
    return f"head_dim {head_dim}, {'causal' if is_causal else 'not causal'}"


def _length(keys: int) -> str:
    """Format 8192 as `8k`."""
    return f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)


def _value(row: Row, figure: float | None) -> Spec | None:
    if figure is None or row.time_ms is None:
        return None
    return {
        "panel": _panel(_head_dim(row.call), row.call.is_causal),
        "kernel": line_name(row),
        "length": _length(row.call.shape.kv_len),
        "value": figure,
        "low": figure * row.time_ms.p50 / row.time_ms.p90,
        "high": figure * row.time_ms.p50 / row.time_ms.p10,
    }


def _layers(x: Spec, unit: str, colour: Spec, shape: Spec) -> list[Spec]:
    def y(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "title": unit}

    return [
        {
            "mark": {"type": "rule", "strokeWidth": 1.2},
            "encoding": {"x": x, "y": y("low"), "y2": {"field": "high"}, "color": colour},
        },
        {
            "mark": {"type": "line", "point": {"filled": True, "size": 45}},
            "encoding": {"x": x, "y": y("value"), "color": colour, "shape": shape},
        },
    ]
