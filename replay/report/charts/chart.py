"""Parts that all charts share: style, colours and titles.

A chart's specification contains all values, so an author can restyle the chart without the rows.
Text from a recording appears in the specification only as data, never in an expression or a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from capture.text.printable import printable
from replay.rows.errors_of_output import AccuracyClass

VEGA_LITE = "6.1"
"""Version of Vega-Lite that specifications use."""

COLOURS = [
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#000000", "#7f7f7f"),
]
"""Okabe and Ito's palette for colour-blind readers, with grey in place of pale yellow."""
CLASS_COLOURS: dict[AccuracyClass, str] = {
    "exact": COLOURS[0],
    "quantised": COLOURS[1],
    "sparse": COLOURS[2],
}
SHAPES = [
    *("circle", "square", "triangle-up", "diamond"),
    *("cross", "triangle-down", "triangle-right", "triangle-left"),
]
"""Point shapes, which distinguish the lines even in black and white."""

LONGEST_WORD = 40
"""Maximum length of a model's or GPU's name in a file name, which file systems limit to 255 bytes.
"""

STYLE = {
    "font": "Helvetica, Arial, Liberation Sans, sans-serif",
    "background": "white",
    "range": {"category": COLOURS, "symbol": SHAPES},
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
    """Chart and the name of the chart's files."""

    name: str
    spec: Spec


def chart(name: Iterable[str], title: str, below: Iterable[str], spec: Spec) -> Chart:
    """Add the common parts to a specification; join the parts of `name` to the files' name."""
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
