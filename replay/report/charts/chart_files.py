"""Writes charts as SVG, PNG and Vega-Lite."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attention_replay.errors import Error
from capture.storage.plain_files import possible
from replay.report.charts.chart import VEGA_LITE, Chart
from replay.report.charts.models import model_charts
from replay.report.charts.sweeps import sweep_charts
from replay.report.html import chart_library
from replay.rows.replacement import why_not_written
from replay.rows.row import Row

PNG_SCALE = 3.0
"""Pixels of a PNG per pixel of the specification, which gives about 300 dpi in a paper's column."""


class PlotError(Error):
    """Reason why charts cannot be written; the message gives the remedy."""


def prepare(directory: Path) -> None:
    """Create the directory for charts, and check early that charts can be drawn.

    Raises:
        MissingPackage: vl-convert-python is not installed.
        PlotError: the directory cannot be created.
    """
    chart_library.require()
    try:
        possible(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(
            f"cannot write --plot {directory} ({error.strerror}): name another directory"
        ) from error


def charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yield every chart for which the rows have figures; leave out incorrect kernels."""
    yield from sweep_charts(rows)
    yield from model_charts(rows)


def write_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write each chart as `.svg`, `.png` and, for restyling, `.vl.json`.

    Returns:
        The written files; empty if the rows have no figures to draw.

    Raises:
        MissingPackage: vl-convert-python is not installed.
        PlotError: the directory cannot be written.
    """
    prepare(directory)
    import vl_convert

    written: list[Path] = []
    try:
        for name, spec in _with_unique_names(charts(rows)):
            for suffix, content in (
                (".vl.json", json.dumps(spec, indent=1, ensure_ascii=False).encode()),
                (".svg", vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE).encode()),
                (".png", vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=PNG_SCALE)),
            ):
                file = directory / f"{name}{suffix}"
                file.write_bytes(content)
                written.append(file)
    except OSError as error:
        raise PlotError(f"cannot write --plot {directory}: {why_not_written(error)}") from error
    return written


def _with_unique_names(found: Iterable[Chart]) -> Iterator[Chart]:
    """Add numbers to the names of charts that would otherwise have equal file names."""
    seen: Counter[str] = Counter()
    for chart in found:
        seen[chart.name] += 1
        number = seen[chart.name]
        yield chart if number == 1 else chart._replace(name=f"{chart.name}-{number}")
