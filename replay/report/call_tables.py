"""Tables of a replay in 80 columns: speed, accuracy and work for each group of calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.console import Group as Renderables
from rich.table import Table
from rich.text import Text

from capture.text.printable import printable
from replay.report.cells import cell
from replay.report.fitted import FittedTable
from replay.report.groups import Group, group_rows, names_by_sentence, place
from replay.report.pooled import worst
from replay.report.ranking import is_correct, rank
from replay.rows.errors_of_output import Errors
from replay.rows.fields import COLUMNS
from replay.rows.row import KernelId, Row

TABLES = ("speed", "training", "gradients", "accuracy", "work", "machine")


def print_report(
    rows: Sequence[Row],
    console: Console,
    *,
    metrics: Sequence[str],
    errors_against: str = "reference",
    per_call: bool = False,
    compare_stats: bool = False,
) -> None:
    """Print the tables of each group of calls.

    Args:
        metrics: names from `METRICS` that select the columns to show.
        errors_against: output that errors are relative to: `reference`, `captured` or a kernel.
        per_call: print tables for each call instead of each group of calls.
        compare_stats: also print the range, mean and deviation of the output and of the reference.
    """
    groups = group_rows(rows, per_call=per_call)
    for group in groups:
        console.print(_group_report(group, metrics, errors_against, compare_stats))
        console.print()


def _group_report(
    group: Group, metrics: Sequence[str], errors_against: str, compare_stats: bool
) -> Renderables:
    parts: list[Text | Table] = [Text(group.title, style="bold")]
    parts.extend(Text(sentence, style="yellow") for sentence in _nonfinite(group))
    if group.weights:
        parts.append(Text(f"weights: {group.weights}", style="dim"))
    if group.backends:
        parts.append(Text(f"recorded with: {group.backends}", style="dim"))
    if origins := sorted({call.grad_output for call in group.calls} - {""}):
        parts.append(Text(f"gradient of the output: {', '.join(origins)}", style="dim"))
    ran = [name for name, rows in group.rows.items() if any(row.accuracy for row in rows)]
    ran.sort(key=lambda name: rank(group, name))
    if ran:
        for table in TABLES:
            paths = [
                path
                for path, column in COLUMNS.items()
                if column.table == table
                and (column.metric in metrics or "all" in metrics)
                and (path != "accuracy_class" or len(group.classes) > 1)
            ]
            headings = [COLUMNS[path].heading for path in paths]
            lines = [[cell(path, group, name, errors_against) for path in paths] for name in ran]
            # Omit a table that would contain only dashes.
            if any(text != "-" for line in lines for text in line):
                parts.append(_table(group, ran, headings, lines))
        if compare_stats:
            parts.append(_stats(group, ran))
        parts.extend(_programs(group, ran))
        if "accuracy" in metrics or "all" in metrics:
            parts.extend(_notes(group, ran, errors_against))
    parts.extend(_rewritten_masks(group, ran))
    parts.extend(_refusals(group))
    return Renderables(*parts)


def _nonfinite(group: Group) -> Iterator[str]:
    """Yield sentences on NaN and infinity in the inputs, and on kernels that differ there."""
    inputs = Counter(call.nonfinite for call in group.calls)
    reasons = {row.call.name: row.not_ranked for rows in group.rows.values() for row in rows}
    for found, start in (
        (inputs, "inputs hold NaN or infinity: "),
        (Counter(reasons.values()), "kernels are not ranked: "),
    ):
        for sentence, count in found.items():
            if sentence:
                some = "" if count == len(group.calls) else f"{count} of {group.size}: "
                yield printable(f"{some}{start}{sentence}")


def _table(
    group: Group, names: Sequence[KernelId], headings: Sequence[str], cells: Sequence[Sequence[str]]
) -> Table:
    """Build a table with one line per kernel; omit empty columns."""
    table = FittedTable("kernel")
    shown = [at for at in range(len(headings)) if any(line[at] != "-" for line in cells)]
    for at in shown:
        table.add_column(headings[at], justify="right", overflow="fold")
    for name, line in zip(names, cells, strict=True):
        style = "" if is_correct(group, name) else "red"
        table.add_row(Text(str(name), style), *(Text(line[at], style) for at in shown))
    return table


def _stats(group: Group, names: Sequence[KernelId]) -> Table:
    """Tabulate the range, mean and deviation of output and reference on the group's first call."""
    figures = ("min", "max", "mean", "std")
    lines = []
    for name in names:
        row = group.rows[name][0]
        lines.append(
            [
                "-" if summary is None else f"{getattr(summary, figure):.3g}"
                for summary in (row.output_summary, row.reference_summary)
                for figure in figures
            ]
        )
    return _table(group, names, [*figures, *(f"ref {figure}" for figure in figures)], lines)


def _notes(group: Group, ran: Sequence[KernelId], errors_against: str) -> list[Text]:
    """Return notes on the noise floor, the places of the worst errors, and changed inputs."""
    notes = []
    floors = worst(
        [row for name in ran for row in group.rows[name]],
        lambda row: row.accuracy.noise_floor if row.accuracy else None,
        lambda errors: errors.relative_l1,
    )
    if floors is not None:
        errors = floors[0]
        notes.append(
            f"noise floor: rel L1 {errors.relative_l1:.1e}, max abs {errors.max_abs:.1e}, the "
            "error of the captured output"
        )
    for name in ran:
        found = worst(
            group.rows[name],
            lambda row: row.accuracy.against(errors_against) if row.accuracy else None,
            lambda errors: errors.relative_l1,
        )
        if found is not None and not is_correct(group, name):
            errors, row = found
            where = f"worst at {place(row.call)}, {_where(errors, row)}"
            ratio = None if row.accuracy is None else row.accuracy.tolerance_ratio
            if row.call.grad_output and ratio is not None and ratio <= 1:
                where = place(row.call)  # the output is right, but a gradient is not
            notes.append(f"{name}: {row.reason}; {where}")
        # A sparse kernel is judged on its chosen keys, but the table has its errors on all keys.
        sparse = [row for row in group.rows[name] if row.kept is not None]
        if sparse:
            notes.append(
                f"{name}: errors are relative to attention to all keys; verdict: {sparse[0].reason}"
            )
    flags = names_by_sentence(
        (str(name), flag) for name in ran for row in group.rows[name] for flag in _flags(row)
    )
    notes += [f"{names}: {flag}" for flag, names in flags.items()]
    return [Text(note, style="dim") for note in notes]


def _flags(row: Row) -> Iterator[str]:
    for name in row.changed_inputs:
        is_kept = name in row.overwrites
        yield f"changes its {name}{', which later calls read again' if is_kept else ''}"
    yield from row.flags


def _where(errors: Errors, row: Row) -> str:
    """Describe the place of the worst error: `batch 0 head 7, queries 64-127: relative L1 …`."""
    where = None if row.accuracy is None else row.accuracy.where
    if where is None:
        batch, head = errors.worst_head
        return f"batch {batch} head {head}"
    (batch, head), (first, last) = where.head, where.queries
    queries = f"query {first}" if first == last else f"queries {first}-{last}"
    return (
        f"batch {batch} head {head}, {queries}: relative L1 {where.worst:.2g}, "
        f"typically {where.typical:.2g}"
    )


def _programs(group: Group, ran: Sequence[KernelId]) -> list[Text]:
    """List the Triton programs inspected with `--metric resources`."""
    lines = {
        f"{name}: {program.name}: {program.registers} registers, {program.spills} spilled, "
        f"{program.shared_bytes / 1024:.0f} KiB shared, {program.warps} warps": None
        for name in ran
        for row in group.rows[name]
        for program in row.programs
    }
    return [Text(line, style="dim") for line in lines]


def _rewritten_masks(group: Group, ran: Sequence[KernelId]) -> list[Text]:
    """List the kernels that ran calls with options in place of their masks."""
    found = names_by_sentence(
        (str(name), row.restated_as) for name in ran for row in group.rows[name] if row.restated_as
    )
    return [
        Text(f"mask rewritten as {words}: {names}", style="dim") for words, names in found.items()
    ]


def _refusals(group: Group) -> list[Text]:
    """List the kernels that could not run some of the group's calls, grouped by reason."""
    first: dict[str, str] = {}
    pairs = []
    for name, rows in group.rows.items():
        for row in rows:
            if row.status not in ("ok", "inaccurate", "not-timed", "unavailable"):
                sentence = f"{row.status}: {row.reason}"
                # A reason may contain sizes that differ from call to call.
                kind = re.sub(r"[\d.]+", "", sentence)
                pairs.append((str(name), first.setdefault(kind, sentence)))
    return [
        Text(f"{names}: {sentence}", style="yellow")
        for sentence, names in names_by_sentence(pairs).items()
    ]
