"""Recorded calls compared with synthetic counterparts that have random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from replay.report.fitted import FittedTable
from replay.report.groups import Group, group_rows
from replay.rows.row import KernelId, Row
from replay.timing.statistics import percentile
from replay.workloads.synthetic_counterparts import KINDS


class Counterparts(NamedTuple):
    """Figures of a kernel on recorded calls of one group and on their synthetic counterparts."""

    kernel: KernelId
    calls: int
    figures: dict[str, dict[str, float | None]]
    """Figures by the calls' values (`recorded`, or one of `KINDS`), then by name in `FIGURES`. Each
    is a median over calls that ran with all kinds of values; None if it was not measured."""


FIGURES: dict[str, tuple[Callable[[Row], float | None], str]] = {
    "speed-up": (lambda row: row.speedup.ratio if row.speedup else None, "{:.2f}×"),
    "rel L1": (lambda row: row.accuracy.reference.relative_l1 if row.accuracy else None, "{:.1e}"),
    # `gpu_during` is unsuitable, because kernels take turns during that measurement.
    "W": (lambda row: row.energy.power_w if row.energy else None, "{:.0f}"),
}
"""Figures of the table and their formats, by heading."""
LEGEND = (
    "random: the figure to its left with standard normal inputs, as a multiple; "
    "matched: the same with the mean and deviation of each recorded channel"
)


def counterparts(rows: Sequence[Row]) -> list[tuple[Group, list[Counterparts]]]:
    """Return, for each group of recorded calls, the figures of each kernel that ran."""
    by_place = {(row.call.name, row.id): row for row in rows}
    weights = {weights for weights, _ in KINDS.values()}
    found = []
    for group in group_rows(row for row in rows if row.call.weights not in weights):
        kernels = []
        for kernel, members in group.rows.items():
            sets = [
                [row, *(by_place.get((f"{row.call.name}-{kind}", kernel)) for kind in KINDS)]
                for row in members
            ]
            whole = [each for each in sets if all(row and row.accuracy for row in each)]
            if whole:
                by_values = zip(("recorded", *KINDS), zip(*whole, strict=True), strict=True)
                figures = {
                    values: {
                        name: _median([figure(row) for row in column if row])
                        for name, (figure, _) in FIGURES.items()
                    }
                    for values, column in by_values
                }
                kernels.append(Counterparts(kernel, len(whole), figures))
        if kernels:
            found.append((group, kernels))
    return found


def print_versus_random(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each group of recorded calls, with synthetic figures as multiples."""
    console.print(Text("recorded against random inputs", style="bold"))
    for group, kernels in counterparts(rows):
        console.print(Text(group.title))
        table = FittedTable("kernel")
        shown = [
            name for name in FIGURES if any(each.figures["recorded"][name] for each in kernels)
        ]
        for name in shown:
            for heading in (name, *KINDS):
                table.add_column(heading, justify="right")
        for each in kernels:
            cells = []
            for name in shown:
                own = each.figures["recorded"][name]
                cells.append("-" if own is None else FIGURES[name][1].format(own))
                cells += [_multiple(each.figures[kind][name], own) for kind in KINDS]
            table.add_row(Text(str(each.kernel)), *cells)
        console.print(table)
        console.print()
    console.print(Text(LEGEND, style="dim"))


def _median(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return percentile(known, 50) if known else None


def _multiple(synthetic: float | None, own: float | None) -> str:
    """Format a ratio of figures, such as `0.12×`; return a dash if a figure is missing."""
    if synthetic is None or not own:
        return "-"
    ratio = synthetic / own
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"
