"""How far random inputs mislead: recorded calls beside twins of random values."""

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
class Misled:
    """A kernel on recorded calls of one kind, and by kind of twin on the same calls' twins.

    Medians over the calls where it ran on all of them; None where a figure was not measured.
    """

    kernel: KernelId
    calls: int
    recorded: dict[str, float | None]
    """By figure: `time` (ms), `speedup`, `error` (relative L1) and `power` (W)."""
    twins: dict[str, dict[str, float | None]]


FIGURES: dict[str, Callable[[Row], float | None]] = {
    "time": lambda row: row.time_ms.p50 if row.time_ms else None,
    "speedup": lambda row: row.speedup.ratio if row.speedup else None,
    "error": lambda row: row.accuracy.reference.relative_l1 if row.accuracy else None,
    # Not that of `gpu_during`: kernels take turns while it is read.
    "power": lambda row: row.energy.power_w if row.energy else None,
}


def misled(rows: Sequence[Row]) -> list[tuple[Group, list[Misled]]]:
    """By group of recorded calls: its kernels that ran, in the rows' order.

    Kernels that are slow or wrong alike on all values are there too.
    """
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
                recorded, *twins = (
                    _figures(list(filter(None, part))) for part in zip(*whole, strict=True)
                )
                by_kind = dict(zip(KINDS, twins, strict=True))
                kernels.append(Misled(kernel, len(whole), recorded, by_kind))
        if kernels:
            found.append((group, kernels))
    return found


def print_versus_random(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each group of recorded calls; random figures as multiples of recorded."""
    console.print(Text("recorded against random inputs", style="bold"))
    for group, kernels in misled(rows):
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
                cells += [_multiple(each.twins[kind][name], own) for kind in KINDS]
            table.add_row(Text(str(each.kernel)), *cells)
        console.print(table)
        console.print()
    console.print(Text(LEGEND, style="dim"))


HEADINGS = {"speedup": "speed-up", "error": "rel L1", "power": "W"}
"""Of the figures that a line has room for."""
FORMS: dict[str, Callable[[float], str]] = {
    "speedup": lambda value: f"{value:.2f}×",
    "error": lambda value: f"{value:.1e}",
    "power": lambda value: f"{value:.0f}",
}
LEGEND = (
    "random: what standard normal values would have made of the figure before it, as a multiple; "
    "matched: the same with the mean and deviation of each recorded channel"
)


def _figures(rows: Sequence[Row]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, figure in FIGURES.items():
        values = [value for row in rows if (value := figure(row)) is not None]
        found[name] = percentile(values, 50) if values else None
    return found


def _multiple(twin: float | None, own: float | None) -> str:
    """`0.12×`; a dash where there is nothing to compare."""
    if twin is None or not own:
        return "-"
    ratio = twin / own
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"
