"""The tables of a replay, 80 columns wide: per group of calls, speed, accuracy and work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.console import Group as Renderables
from rich.table import Table
from rich.text import Text

from replay.accuracy.tolerance import COSINE_NOISE
from replay.report import METRICS
from replay.report.groups import (
    Group,
    errors_against,
    group_rows,
    place,
    pooled_speedup,
    statuses,
    typical_time,
    worst,
)
from replay.rows.row import Row

Cell = Callable[[Group, str], str]


@dataclass(frozen=True)
class Column:
    """A heading, the cell of one kernel in one group, and the row field that it comes from."""

    heading: str
    cell: Cell
    field: str
    over_calls: str = "the median over the calls"
    """What one cell says of several calls."""


def columns(metrics: Sequence[str], reference: str = "gold") -> list[list[Column]]:
    """The columns that some of `METRICS` choose, table by table: speed, accuracy, work."""
    wanted = set(METRICS) if "all" in metrics else set(metrics)
    tables = (_speed(wanted), _accuracy(wanted, reference), _work(wanted))
    return [table for table in tables if table]


def print_report(
    rows: Sequence[Row],
    console: Console,
    *,
    metrics: Sequence[str],
    reference: str = "gold",
    per_call: bool = False,
    compare_stats: bool = False,
) -> None:
    """Print tables of all rows.

    Args:
        metrics: some of `METRICS`; they choose columns, every figure is of the same run.
        reference: what accuracy columns are against: `gold`, `captured` or a kernel's name.
        per_call: a table per call instead of one per group of alike calls.
        compare_stats: also range, mean and deviation of output and reference.
    """
    groups = group_rows(rows, per_call=per_call)
    for group in groups:
        console.print(_group_report(group, metrics, reference, compare_stats))
        console.print()
    _print_not_run(rows, console)
    if len(groups) > 1:
        _print_fastest(groups, console)


def _group_report(
    group: Group, metrics: Sequence[str], reference: str, compare_stats: bool
) -> Renderables:
    parts: list[Text | Table] = [Text(group.title, style="bold")]
    if group.weights:
        parts.append(Text(f"weights: {group.weights}", style="dim"))
    ran = [name for name, rows in group.rows.items() if any(row.accuracy for row in rows)]
    ran.sort(key=lambda name: _rank(group, name))
    if ran:
        tables = columns(metrics, reference) + ([_stats()] if compare_stats else [])
        parts.extend(_table(group, ran, table) for table in tables)
        parts.extend(_programs(group, ran))
        if "accuracy" in metrics or "all" in metrics:
            parts.extend(_notes(group, ran, reference))
    parts.extend(_refusals(group))
    return Renderables(*parts)


def _rank(group: Group, name: str) -> tuple[bool, float]:
    """The correct first, by time."""
    time = typical_time(group.rows[name])
    return (not _is_correct(group, name), time.p50 if time else float("inf"))


def _is_correct(group: Group, name: str) -> bool:
    return all(row.is_correct for row in group.rows[name])


def _is_sparse(group: Group, name: str) -> bool:
    return any(row.kept is not None for row in group.rows[name])


def _table(group: Group, names: Sequence[str], wanted: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="cyan", padding=(0, 1, 0, 0))
    table.add_column("kernel", overflow="fold", min_width=min(20, max(map(len, names))))
    cells = {column: [column.cell(group, name) for name in names] for column in wanted}
    shown = [column for column in wanted if any(cell != "-" for cell in cells[column])]
    for column in shown:
        table.add_column(column.heading, justify="right", overflow="fold")
    for row, name in enumerate(names):
        style = "" if _is_correct(group, name) else "red"
        table.add_row(Text(name, style), *(Text(cells[column][row], style) for column in shown))
    return table


def _speed(wanted: set[str]) -> list[Column]:
    chosen = []
    if "time" in wanted:
        chosen += [
            Column("time ms", _time_cell, "time_ms.p50"),
            Column("core ms", _core_cell, "core_time_ms.p50"),
            Column("p10-p90", _spread_cell, "time_ms.p10"),
            Column("speed-up", _speedup_cell, "speedup.ratio", "paired over all their rounds"),
        ]
    if "throughput" in wanted:
        chosen.append(Column("TFLOPS", _median_of("tflops", ".3g"), "tflops"))
    return chosen


def _accuracy(wanted: set[str], reference: str) -> list[Column]:
    if "accuracy" not in wanted:
        return []

    def error(heading: str, name: str, form: Callable[[float], str], sign: int) -> Column:
        cell = _worst_error(reference, name, form, sign)
        return Column(heading, cell, f"accuracy.gold.{name}", "the worst of the calls")

    return [
        error("cosine", "cosine", _not_rounded_up(6), -1),
        error("rel L1", "relative_l1", "{:.1e}".format, 1),
        error("RMSE", "rmse", "{:.1e}".format, 1),
        error("max abs", "max_abs", "{:.1e}".format, 1),
        error("row min", "row_cosine_min", _not_rounded_up(4), -1),
        error("NaN", "nan_count", lambda count: str(count) if count else "-", 1),
        Column("kept", _kept_cell, "kept"),
        Column(
            "verdict", lambda group, name: statuses(group.rows[name]), "status", "of every call"
        ),
    ]


def _not_rounded_up(digits: int) -> Callable[[float], str]:
    """Format a cosine so that only an exact 1, but for float64's own noise, reads 1.000000."""

    def form(value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        return f"{math.floor((value + COSINE_NOISE) * 10**digits) / 10**digits:.{digits}f}"

    return form


def _work(wanted: set[str]) -> list[Column]:
    chosen = []
    if "bandwidth" in wanted:
        chosen.append(Column("GB/s", _median_of("gb_per_s", ".4g"), "gb_per_s"))
    if "arithmetic_intensity" in wanted:
        chosen.append(Column("FLOP/B", _median_of("flop_per_byte", ".4g"), "flop_per_byte"))
    if "memory" in wanted:
        chosen += [
            Column("peak MB", _median_of("peak_bytes", ".1f", 1e-6), "peak_bytes"),
            Column("first ms", _median_of("first_call_ms", ".1f"), "first_call_ms"),
            Column("host ms", _median_of("host_ms", ".3f"), "host_ms"),
        ]
    return chosen


def _stats() -> list[Column]:
    """Of the first call of the group."""

    def cell(which: str, name: str) -> Cell:
        def figure(group: Group, kernel: str) -> str:
            summary = getattr(group.rows[kernel][0], which)
            return "-" if summary is None else f"{getattr(summary, name):.3g}"

        return figure

    return [
        Column(f"{heading}{name}", cell(which, name), f"{which}.{name}", "the first call")
        for which, heading in (("output_summary", ""), ("reference_summary", "ref "))
        for name in ("min", "max", "mean", "std")
    ]


def _kept_cell(group: Group, name: str) -> str:
    kept = sorted(row.kept for row in group.rows[name] if row.kept is not None)
    return f"{kept[len(kept) // 2]:.3g}" if kept else "-"


def _time_cell(group: Group, name: str) -> str:
    time = typical_time(group.rows[name])
    return f"{time.p50:.4g}" if time else "-"


def _spread_cell(group: Group, name: str) -> str:
    time = typical_time(group.rows[name])
    return f"{time.p10:.3g}-{time.p90:.3g}" if time else "-"


def _core_cell(group: Group, name: str) -> str:
    times = [row.core_time_ms.p50 for row in group.rows[name] if row.core_time_ms is not None]
    return f"{sorted(times)[len(times) // 2]:.4g}" if times else "-"


def _speedup_cell(group: Group, name: str) -> str:
    if name.partition("@")[0] == group.baseline:
        return "baseline"
    speedup = pooled_speedup(group, name) if _is_correct(group, name) else None
    if speedup is None:
        return "-"
    if speedup.verdict == "tie":
        return f"{speedup.ratio:.2f}× tie"
    return f"{speedup.ratio:.2f}× ({speedup.low:.2f}-{speedup.high:.2f})"


def _median_of(name: str, form: str, factor: float = 1.0) -> Cell:
    def cell(group: Group, kernel: str) -> str:
        values = sorted(
            value for row in group.rows[kernel] if (value := getattr(row, name)) is not None
        )
        return format(values[len(values) // 2] * factor, form) if values else "-"

    return cell


def _worst_error(reference: str, name: str, form: Callable[[float], str], sign: int) -> Cell:
    def cell(group: Group, kernel: str) -> str:
        def figure(row: Row) -> float | None:
            errors = errors_against(row, reference)
            return None if errors is None else getattr(errors, name)

        found = worst(group.rows[kernel], figure, lambda value: sign * value)
        return "-" if found is None else form(found[0])

    return cell


def _notes(group: Group, ran: Sequence[str], reference: str) -> list[Text]:
    """Where the worst errors are, and the error that the recorded output has itself."""
    notes = []
    floors = worst(
        [row for name in ran for row in group.rows[name]],
        lambda row: row.accuracy.noise_floor if row.accuracy else None,
        lambda errors: errors.relative_l1,
    )
    if floors is not None:
        errors = floors[0]
        notes.append(
            f"noise floor: the recorded output itself has rel L1 {errors.relative_l1:.1e}, "
            f"max abs {errors.max_abs:.1e} against the gold"
        )
    for name in ran:
        found = worst(
            group.rows[name],
            lambda row: errors_against(row, reference),
            lambda errors: errors.relative_l1,
        )
        if found is not None and not _is_correct(group, name):
            errors, row = found
            batch, head = errors.worst_head
            notes.append(
                f"{name}: {row.reason}; worst at {place(row.call)}, batch {batch} head {head}"
            )
        kept = [row for row in group.rows[name] if row.kept is not None]
        if kept:
            notes.append(
                f"{name}: errors are against attention to all keys; its verdict is {kept[0].reason}"
            )
        changed = {each for row in group.rows[name] for each in row.changed_inputs}
        spoilt = {each for row in group.rows[name] for each in row.overwrites}
        flags = [
            f"changes its {each}" + (", which later calls read again" if each in spoilt else "")
            for each in sorted(changed)
        ]
        flags += sorted({flag for row in group.rows[name] for flag in row.flags})
        if flags:
            notes.append(f"{name}: {', '.join(flags)}")
    return [Text(note, style="dim") for note in notes]


def _programs(group: Group, ran: Sequence[str]) -> list[Text]:
    """A line per Triton program that was looked at with --resources."""
    lines = {
        f"{name}: {program.name}: {program.registers} registers, {program.spills} spilled, "
        f"{program.shared_bytes / 1024:.0f} KiB shared, {program.warps} warps": None
        for name in ran
        for row in group.rows[name]
        for program in row.programs
    }
    return [Text(line, style="dim") for line in lines]


def _refusals(group: Group) -> list[Text]:
    """Kernels that could not run some of these calls, with the reason."""
    lines: dict[str, None] = {}
    for name, rows in group.rows.items():
        for row in rows:
            if row.status not in ("ok", "inaccurate", "not-timed", "unavailable"):
                lines[f"{name}: {row.status}: {row.reason}"] = None
    return [Text(line, style="yellow") for line in lines]


def _print_not_run(rows: Sequence[Row], console: Console) -> None:
    """Kernels that cannot run here, brought together by reason."""
    unavailable = {row.label: row.reason for row in rows if row.status == "unavailable"}
    if not unavailable:
        return
    console.print(Text("not available here", style="bold"))
    for reason in dict.fromkeys(unavailable.values()):
        names = ", ".join(name for name, other in unavailable.items() if other == reason)
        line = Text(f"  {reason}: ").append(names, "dim")
        console.print(line)
    console.print()


def _print_fastest(groups: Sequence[Group], console: Console) -> None:
    """One line a group: which kernel to run, and which others are as fast."""
    console.print(Text("fastest correct kernel", style="bold"))
    for group in groups:
        timed = [
            name
            for name in group.rows
            if _is_correct(group, name)
            and typical_time(group.rows[name])
            and not any(row.overwrites for row in group.rows[name])
            # A sparse kernel does less: whether that is enough is no matter of speed.
            and not _is_sparse(group, name)
        ]
        if not timed:
            continue
        best, *others = sorted(timed, key=lambda name: _rank(group, name))
        ties = [name for name in others if _is_tie(group, best, name)]
        line = Text("  " + " · ".join(group.title.split(" · ")[:3]) + ": ")
        line.append(best, "bold green")
        is_baseline = best.partition("@")[0] == group.baseline
        if group.baseline and not is_baseline and group.baseline not in ties:
            line.append(f" {_speedup_cell(group, best)} vs {group.baseline}")
        if ties:
            line.append(f", tied with {', '.join(ties)}", "dim")
        console.print(line)


def _is_tie(group: Group, best: str, other: str) -> bool:
    speedup = pooled_speedup(group, best, over=other)
    return speedup is not None and speedup.verdict != "faster"
