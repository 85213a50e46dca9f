"""Draws the plot of the README and the docs from committed results.

    python -m benchmarks.picture

docs/pictures/speedup_and_error.svg has one dot per kernel: the measured speed-up of a denoising
step of full-size CogVideoX-2b (`end_to_end.csv`) against the worst relative L1 error on calls of
the small trained CogVideoX (`trained_weights.csv`).
"""

from __future__ import annotations

from pathlib import Path

import vl_convert

from benchmarks import results
from replay.kernels.registry import catalogue
from replay.report.charts.chart import CLASS_COLOURS, VEGA_LITE, Chart, Spec, chart

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
CLOSE = 0.01
"""Distance of two speed-ups below which their labels would overlap."""


def dots() -> dict[str, tuple[float, float, float, float]]:
    """Return worst relative L1, speed-up, and the ends of its 95 % interval, by kernel."""
    errors = {
        row["kernel"]: float(row["relative_l1.worst"])
        for row in results.read(results.DIRECTORY / "trained_weights.csv")
        if (row["model"], row["values"], row["status"]) == ("cogvideo", "trained weights", "ok")
    }
    found = {}
    for row in results.read(results.DIRECTORY / "end_to_end.csv"):
        kernel = row["kernel"]
        is_step = (row["model"], row["span"]) == ("cogvideo", "denoise")
        if is_step and kernel in errors and row["measured.speedup.ratio"]:
            ratio, low, high = (
                float(row[f"measured.speedup.{name}"]) for name in ("ratio", "low", "high")
            )
            found[kernel] = (errors[kernel], ratio, low, high)
    return found


def picture() -> Chart:
    """Return the plot, with a dot, an interval and a label per kernel."""
    found = dots()
    values = []
    for kernel, (error, ratio, low, high) in found.items():
        # Of two neighbouring dots, the upper has its label above, the lower below.
        close = [other[1] for other in found.values() if 0 < abs(other[1] - ratio) < CLOSE]
        values.append(
            {
                "kernel": kernel,
                "class": f"{catalogue()[kernel].accuracy_class} kernels",
                "error": error,
                "ratio": ratio,
                "low": low,
                "high": high,
                "shift": sum(-8 if ratio > other else 8 for other in close),
            }
        )
    classes = {f"{name} kernels": CLASS_COLOURS[name] for name in ("exact", "quantised")}
    colour = {
        "field": "class",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(classes), "range": list(classes.values())},
        "legend": {"orient": "bottom-right"},
    }
    x: Spec = {
        "field": "error",
        "type": "quantitative",
        "scale": {"type": "log"},
        "axis": {"format": "~g", "tickCount": 4, "grid": False},
        "title": "worst relative L1 error of a recorded call (small trained CogVideoX)",
    }

    def y(field: str) -> Spec:
        title = "measured speed-up of a denoising step"
        scale = {"zero": False}
        return {"field": field, "type": "quantitative", "title": title, "scale": scale}

    label = {"type": "text", "align": "left", "dx": 9, "dy": {"expr": "datum.shift"}}
    own = {"y": {"datum": 1, "type": "quantitative"}}
    spec = {
        "width": 560,
        "height": 300,
        "data": {"values": values},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [5, 4], "color": "#7f7f7f"}, "encoding": own},
            {
                "data": {"values": [{}]},
                "mark": {
                    "type": "text",
                    "text": "the model's own attention",
                    "align": "right",
                    "dy": -7,
                    "color": "#666666",
                },
                "encoding": {**own, "x": {"value": "width"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": x, "y": y("low"), "y2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
                "encoding": {"x": x, "y": y("ratio"), "color": colour},
            },
            {
                "mark": {**label, "fontSize": 12},
                "encoding": {"x": x, "y": y("ratio"), "text": {"field": "kernel"}},
            },
        ],
    }
    return chart(["speedup_and_error"], "CogVideoX-2b, NVIDIA H200", [], spec)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    drawn = picture()
    svg = vl_convert.vegalite_to_svg(drawn.spec, vl_version=VEGA_LITE)
    (PICTURES / f"{drawn.name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
