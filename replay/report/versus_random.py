"""Recorded calls compared with synthetic counterparts that have random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from replay.report.fitted import FittedTable
from replay.report.groups import Group, group_rows
from replay.rows.row import KernelId, Row
from replay.timing.statistics import percentile
from replay.workloads.synthetic_counterparts import KINDS


@dataclass(frozen=True)
class Counterparts:
    """Figures of a kernel on recorded calls of one kind, and on their synthetic counterparts.

    Figures are medians over the calls that ran in every version; None if not measured.
    """

    kernel: KernelId
    calls: int
    recorded: dict[str, float | None]
    """Figures by name: `time` (ms), `speedup`, `error` (relative L1) and `power` (W)."""
    synthetic: dict[str, dict[str, float | None]]
    """Figures by kind of counterpart and by name."""


FIGURES: dict[str, Callable[[Row], float | None]] = {
    "time": lambda row: row.time_ms.p50 if row.time_ms else None,
    "speedup": lambda row: row.speedup.ratio if row.speedup else None,
    "error": lambda row: row.accuracy.reference.relative_l1 if row.accuracy else None,
    # `gpu_during` is unsuitable, because kernels take turns while it is sampled.
    "power": lambda row: row.energy.power_w if row.energy else None,
}


def counterparts(rows: Sequence[Row]) -> list[tuple[Group, list[Counterparts]]]:
    """Return the kernels that ran for each group of recorded calls, in the order of the rows."""
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
                recorded, *synthetic = (
                    _figures(list(filter(None, part))) for part in zip(*whole, strict=True)
                )
                by_kind = dict(zip(KINDS, synthetic, strict=True))
                kernels.append(Counterparts(kernel, len(whole), recorded, by_kind))
        if kernels:
            found.append((group, kernels))
    return found


def print_versus_random(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each group of recorded calls; synthetic figures are shown as multiples."""
    console.print(Text("recorded against random inputs", style="bold"))
    for group, kernels in counterparts(rows):
        console.print(Text(group.title))
        table = FittedTable()
        table.add_column("kernel", overflow="fold")
        shown = [name for name in HEADINGS if any(each.recorded[name] for each in kernels)]
        for name in shown:
            table.add_column(HEADINGS[name], justify="right")
            for kind in KINDS:
                table.add_column(kind, justify="right")
        for each in kernels:
            cells = []
            for name in shown:
                own = each.recorded[name]
                cells.append("-" if own is None else FORMS[name](own))
                cells += [_multiple(each.synthetic[kind][name], own) for kind in KINDS]
            table.add_row(Text(str(each.kernel)), *cells)
        console.print(table)
        console.print()
    console.print(Text(LEGEND, style="dim"))


HEADINGS = {"speedup": "speed-up", "error": "rel L1", "power": "W"}
"""Headings of the figures shown in the table."""
FORMS: dict[str, Callable[[float], str]] = {
    "speedup": lambda value: f"{value:.2f}×",
    "error": lambda value: f"{value:.1e}",
    "power": lambda value: f"{value:.0f}",
}
LEGEND = (
    "random: the figure before it with standard normal inputs, as a multiple; "
    "matched: the same with the mean and deviation of each recorded channel"
)


def _figures(rows: Sequence[Row]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        values = [value for row in rows if (value := figure(row)) is not None]
        found[name] = percentile(values, 50) if values else None
    return found


def _multiple(synthetic: float | None, own: float | None) -> str:
    """Format as `0.12×`; a dash if a figure is missing."""
    if synthetic is None or not own:
        return "-"
    ratio = synthetic / own
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"
