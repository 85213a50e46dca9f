"""History of kept runs: a static page with the speed of every kernel over commits and dates.

The page needs no network and no script: its charts are drawn when it is written.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attention_replay import __version__
from capture.text.counted import counted
from capture.text.printable import printable
from replay.comparison.row_matching import Run
from replay.report.charts.chart import COLOURS, VEGA_LITE, chart
from replay.report.groups import Group, joined
from replay.report.html import chart_library
from replay.report.matrix import Cell, matrix
from replay.report.pooled import typical_time
from replay.rows.row import KernelId

LINES = len(COLOURS)
"""Maximum number of kernels in a chart; the table below has all."""

LEGEND = (
    "A cross marks a kernel that is wrong or failed, at 0 where it has no speed-up. "
    "At any other gap, the kernel did not run, or its speed-up is unconfirmed."
)

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; } h3 { margin: 1.5rem 0 .5rem; }
.quiet { color: GrayText; margin-top: .2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { max-width: 100%; height: auto; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: .5rem; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr + tr { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
.wrong { color: light-dark(#b00020, #ff8a80); font-weight: bold; }
"""


@dataclass(frozen=True)
class Point:
    """Result of a kernel in one kind of call of one run."""

    cell: Cell
    ms: float | None
    """Median time; None if the kernel was not timed."""


History = dict[str, dict[str, dict[KernelId, dict[int, Point]]]]
"""Points by device, kind of call, kernel, and index of the run."""


def history_page(runs: Sequence[Run]) -> str:
    """Return an HTML page with charts and tables over the runs, the oldest first.

    Raises:
        MissingPackage: the chart library is not installed.
    """
    chart_library.require()
    return "\n".join(_page(sorted(runs, key=lambda run: run.measured_at))) + "\n"


def history(runs: Sequence[Run]) -> History:
    """Return the results of runs by device, kind of call and kernel."""
    found: History = {}
    for number, run in enumerate(runs):
        for device in run.devices:
            cells = matrix([row for row in run.rows if row.machine.device in (device, "")])
            for at, kind in enumerate(cells.kinds):
                by_kernel = found.setdefault(device, {}).setdefault(_name(kind), {})
                for kernel, rows in kind.rows.items():
                    time = typical_time(rows)
                    point = Point(cells.cells[kernel, at], time.p50 if time else None)
                    by_kernel.setdefault(kernel, {})[number] = point
    return found


def _name(kind: Group) -> str:
    """Name a kind of call without the number of its calls, which may differ between runs."""
    return joined(kind.model, kind.phase, kind.shape, kind.dtype, kind.mask)


def _page(runs: Sequence[Run]) -> Iterator[str]:
    found = history(runs)
    dates = [run.measured_at[:10] for run in runs if run.measured_at]
    span = f", {dates[0]} to {dates[-1]}" if dates else ""
    yield "<!doctype html>"
    yield '<html lang="en"><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>History of attention kernels</title><style>{STYLE}</style>"
    yield "<h1>History of attention kernels</h1>"
    yield f'<p class="quiet">{counted(len(runs), "run")}{span}</p>'
    yield f'<p class="quiet">{LEGEND}</p>'
    for device, kinds in found.items():
        labels = _labels(runs, device)
        yield f"<h2>{html.escape(printable(device))}</h2>"
        for name, kernels in kinds.items():
            yield f"<h3>{html.escape(name)}</h3>"
            yield '<div class="charts">'
            yield from _charts(kernels, labels)
            yield "</div>"
            yield "<details><summary>Speed-ups and times in ms</summary>"
            yield from _table(kernels, labels)
            yield "</details>"
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield f'<p class="quiet">Written {written} by attention-replay {html.escape(__version__)}.</p>'


def _labels(runs: Sequence[Run], device: str) -> list[str]:
    """Name each run of a device by its commit, or else its file, and its date.

    Runs of one commit also have their time, and if that is unknown or equal, a number. Runs of
    other devices have a name too, which the device does not use.
    """
    names = [printable(run.commit or Path(run.name).stem) for run in runs]
    pairs = list(zip(names, runs, strict=True))
    runs_of = Counter(name for name, run in pairs if device in run.devices)
    labels, used = [], Counter[str]()
    for name, run in pairs:
        date, time = run.measured_at[:10], run.measured_at[11:19]
        label = joined(name, f"{date} {time}".strip() if runs_of[name] > 1 else date)
        used[label] += device in run.devices
        labels.append(f"{label} ({used[label]})" if used[label] > 1 else label)
    return labels


def _charts(kernels: dict[KernelId, dict[int, Point]], labels: Sequence[str]) -> Iterator[str]:
    """Draw the speed-ups and the times of the kernels whose speed changed most, each as SVG."""
    import vl_convert

    shown = sorted(kernels, key=lambda kernel: -_growth(kernels[kernel]))[:LINES]
    values = [
        {"kernel": printable(str(kernel)), "run": labels[at], **_figures(point)}
        for kernel in sorted(shown)
        for at, point in kernels[kernel].items()
    ]
    at = sorted({at for points in kernels.values() for at in points})
    x = {
        "field": "run",
        "type": "ordinal",
        "title": None,
        "sort": None,
        "scale": {"domain": [labels[number] for number in at]},
        "axis": {
            "labelAngle": 0,
            "labelExpr": "split(datum.label, ' · ')",  # two lines
            "labelOverlap": True,
            "labelSeparation": 8,
        },
    }
    left_out = len(kernels) - len(shown)
    notes = [f"the {LINES} kernels whose speed changed most"] if left_out else []
    for panel in (
        _panel(x, "ratio", "speed-up over the baseline, ×", ("low", "high")),
        _panel(x, "ms", "median time, ms", None),
    ):
        spec = {"data": {"values": values}, **panel}
        drawn = chart(("history",), "", notes, spec).spec
        yield str(vl_convert.vegalite_to_svg(drawn, vl_version=VEGA_LITE))


def _growth(points: dict[int, Point]) -> float:
    """Return the largest speed-up divided by the smallest; the same of times for a baseline."""
    ratios = [point.cell.speedup.ratio for point in points.values() if point.cell.speedup]
    figures = ratios or [point.ms for point in points.values() if point.ms]
    return max(figures) / min(figures) if figures else 0.0


def _figures(point: Point) -> dict[str, Any]:
    speedup = point.cell.speedup
    ratio = speedup and speedup.ratio
    is_wrong = point.cell.outcome == "wrong"
    without = 0.0 if is_wrong else None
    return {
        "ms": point.ms,
        "ms mark": without if point.ms is None else point.ms,
        "ratio": ratio,
        "ratio mark": without if ratio is None else ratio,
        "low": speedup and speedup.low,
        "high": speedup and speedup.high,
        "output": "wrong" if is_wrong else "right",
    }


def _panel(x: Any, field: str, title: str, interval: tuple[str, str] | None) -> dict[str, Any]:
    """Return a chart of a figure: a line per kernel, a cross where its output is wrong.

    A line has a gap where there is no figure; the cross is then drawn at 0.
    """

    def y(name: str) -> dict[str, Any]:
        return {"field": name, "type": "quantitative", "title": title, "scale": {"zero": True}}

    legend = {"orient": "bottom", "columns": 3, "symbolType": "circle"}
    colour = {"field": "kernel", "type": "nominal", "title": None, "legend": legend}
    marks: list[dict[str, Any]] = [{"mark": "line", "encoding": {"y": y(field)}}]
    if interval is not None:
        low, high = interval
        ends = {"y": y(low), "y2": {"field": high}}
        marks.append({"mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": ends})
    outputs = {"field": "output", "type": "nominal", "legend": None}
    domain = ["right", "wrong"]
    shape = {**outputs, "scale": {"domain": domain, "range": ["circle", "M-1,-1L1,1M1,-1L-1,1"]}}
    size = {**outputs, "scale": {"domain": domain, "range": [45, 160]}}
    points = {"type": "point", "filled": False, "opacity": 1, "strokeWidth": 2.5}
    figure = y(f"{field} mark")
    marks.append({"mark": points, "encoding": {"y": figure, "shape": shape, "size": size}})
    encoding = {"x": x, "color": colour}
    return {"width": 390, "height": 220, "encoding": encoding, "layer": marks}


def _table(kernels: dict[KernelId, dict[int, Point]], labels: Sequence[str]) -> Iterator[str]:
    """Yield a table of all kernels, the newest run first."""
    at = sorted({at for points in kernels.values() for at in points}, reverse=True)
    headings = "".join(f"<th>{html.escape(labels[number])}" for number in at)
    yield f'<div class="wide"><table><tr><th>kernel{headings}'
    for kernel, points in kernels.items():
        cells = "".join(_cell(points.get(number)) for number in at)
        yield f"<tr><td>{html.escape(printable(str(kernel)))}{cells}"
    yield "</table></div>"


def _cell(point: Point | None) -> str:
    if point is None:
        return "<td>"
    time = f" · {point.ms:.4g}" if point.ms else ""
    return f"<td{' class=wrong' if point.cell.outcome == 'wrong' else ''}>{point.cell.text}{time}"
