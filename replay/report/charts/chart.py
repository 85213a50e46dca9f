"""Common parts of all charts: look, colours, titles, and the choice of kernels for line charts.

The specification contains all values, so that an author can restyle a chart without the rows. Text
from a recording appears in it only as data, never in an expression or a link.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from capture.text.printable import printable
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import HERE, Row

VEGA_LITE = "6.1"
"""Version of the Vega-Lite language."""

OKABE_ITO = {
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "orange": "#e69f00",
    "sky blue": "#56b4e9",
    "black": "#000000",
    "grey": "#7f7f7f",
}
"""Okabe and Ito's palette, safe for colour-blind readers, with grey in place of its pale yellow."""
CLASS_COLOURS: dict[AccuracyClass, str] = {
    "exact": OKABE_ITO["blue"],
    "quantised": OKABE_ITO["vermillion"],
    "sparse": OKABE_ITO["green"],
}
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
SHAPES += ["triangle-right", "triangle-left"]
"""Shapes that distinguish the lines even in black and white."""

LEGEND_SYMBOL, LETTER = 34, 6.0
"""Widths in a legend, in pixels: a symbol with the space around it, and a letter."""

MOST_LINES = len(OKABE_ITO)
"""Maximum number of kernels in a line chart."""

LONGEST_WORD = 40
"""Maximum length of a model's or GPU's name in a file name, which file systems limit to 255 bytes.
"""

STYLE = {
    "font": "Helvetica, Arial, Liberation Sans, sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "title": {"fontSize": 13, "subtitleFontSize": 11, "anchor": "start", "offset": 10},
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": "#e4e4e4",
        "domainColor": "#666666",
        "tickColor": "#666666",
    },
    "legend": {"labelFontSize": 11, "labelLimit": 260, "columnPadding": 14},
    "line": {"strokeWidth": 1.8},
}

Spec = dict[str, Any]


class Chart(NamedTuple):
    """Chart and the name of its files."""

    name: str
    spec: Spec


class Lines(NamedTuple):
    """Kernels that a line chart shows."""

    names: list[str]
    """Names from `line_name`, the fastest kernel first."""
    note: list[str]
    """Sentences about kernels that are not shown."""


def chart(name: Iterable[str], title: str, below: Iterable[str], spec: Spec) -> Chart:
    """Add the common parts to a specification; the parts of `name` become the file's name."""
    words = [re.sub(r"\W+", "-", part).strip("-")[:LONGEST_WORD] for part in name]
    whole = {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE}.json",
        "title": {"text": title, "subtitle": list(below)},
        **spec,
        "config": STYLE,
    }
    return Chart("-".join(filter(None, words)).lower(), _printable_tree(whole))


def _printable_tree(value: Any) -> Any:
    """Make all text of a specification printable, because control codes crash vl-convert."""
    if isinstance(value, dict):
        return {key: _printable_tree(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_printable_tree(part) for part in value]
    return printable(value) if isinstance(value, str) else value


def line_name(row: Row) -> str:
    """Return a name such as `sage2 (quantised)`; the class of exact kernels is left out."""
    of_class = row.accuracy_class or "exact"
    return printable(str(row.id) + (f" ({of_class})" if of_class != "exact" else ""))


def lines(rows: Sequence[Row]) -> Lines:
    """Choose the correct kernels of the rows, or the fastest of them if there are too many.

    A kernel's rank is its median time over the calls, in units of the fastest kernel's.
    """
    baselines = {row.speedup.vs for row in rows if row.speedup}
    # Every other environment runs the baseline too, to pair its rounds with it.
    rows = [row for row in rows if row.environment == HERE or row.kernel not in baselines]
    wrong = list(dict.fromkeys(line_name(row) for row in rows if row.status == "inaccurate"))
    timed = [
        (row, row.time_ms.p50)
        for row in rows
        if row.time_ms and row.time_ms.p50 > 0 and row.is_correct and line_name(row) not in wrong
    ]
    best: dict[str, float] = {}
    for row, ms in timed:
        best[row.call.name] = min(ms, best.get(row.call.name, ms))
    slowness: dict[str, list[float]] = {}
    for row, ms in timed:
        slowness.setdefault(line_name(row), []).append(ms / best[row.call.name])
    order = sorted(slowness, key=lambda name: statistics.median(slowness[name]))
    note = [f"incorrect and not shown: {_some(wrong)}"] if wrong else []
    if len(order) > MOST_LINES:
        note.append(f"the fastest {MOST_LINES} of {len(order)} correct kernels")
    return Lines(order[:MOST_LINES], note)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def line_encoding(names: Sequence[str], width: float) -> Spec:
    """Return a colour and a shape for each kernel; the legend below lists them in this order.

    Args:
        width: width of the whole chart, in pixels, which the legend must not exceed.
    """
    columns = max(1, int(width / (LEGEND_SYMBOL + LETTER * max(map(len, names)))))
    legend = {"orient": "bottom", "columns": columns, "title": None}
    field = {"field": "kernel", "type": "nominal", "sort": list(names), "legend": legend}
    colours = list(OKABE_ITO.values())[: len(names)]
    return {
        "color": {**field, "scale": {"domain": list(names), "range": colours}},
        "shape": {**field, "scale": {"domain": list(names), "range": SHAPES[: len(names)]}},
    }
