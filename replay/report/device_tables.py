"""Tables that compare speed-ups on the same calls between several types of device."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.comparison.device_types import AcrossDevices
from replay.report.call_tables import print_report
from replay.report.cells import cell
from replay.report.comparison.markdown import escaped, markdown_table
from replay.report.fitted import FittedTable
from replay.report.groups import Group, group_rows, told_apart
from replay.report.ranking import fastest, rank
from replay.rows.row import KernelId

SPEEDUP = "speedup.ratio"
READING = (
    "each device's speed-up is over its own baseline; fastest: the fastest correct kernel, of the "
    "exact or of the quantised ones; tied: as fast as the fastest, within a narrow interval; "
    "inconclusive: it may be as fast, or much slower"
)


def print_devices(
    merged: AcrossDevices, console: Console, *, metrics: Sequence[str] = ("time",)
) -> None:
    """Print each device's tables, then a matrix of kernels and devices for each kind of call.

    Args:
        metrics: names from `replay.rows.fields.METRICS` that each device's tables show.
    """
    for device, rows in merged.rows.items():
        console.print(Text(printable(device), "bold underline"))
        console.print()
        print_report(rows, console, metrics=metrics)
        console.print()
    print_matrices(merged, console)


def print_matrices(merged: AcrossDevices, console: Console) -> None:
    """Print a matrix of kernels and devices for each kind of call."""
    console.print(Text("kernels × devices", "bold underline"))
    console.print(Text(READING, "dim"))
    if note := left_out(merged):
        console.print(Text(note, "yellow"))
    for title, headings, lines in matrices(merged):
        console.print()
        console.print(Text(title, "bold"))
        table = FittedTable(*headings)
        for line in lines:
            table.add_row(*map(Text, line))
        console.print(table)


def devices_markdown(merged: AcrossDevices) -> str:
    """Return the matrices of kernels and devices as Markdown."""
    parts = [READING, *filter(None, [left_out(merged)])]
    for title, headings, lines in matrices(merged):
        parts.append(f"**{escaped(title)}**\n\n{markdown_table([headings, *lines])}".rstrip())
    return "\n\n".join(parts) + "\n"


def left_out(merged: AcrossDevices) -> str:
    """Describe the calls that no matrix contains; return an empty string if all have one."""
    if not merged.left_out:
        return ""
    count = counted(merged.left_out, "call")
    return f"left out: {count} not replayed on every device"


def matrices(merged: AcrossDevices) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, the headings and a line per kernel for each kind of call.

    Kernels that ran on no device are omitted. The others are sorted by speed on the first device.
    """
    groups = {}
    for device, rows in merged.rows.items():
        found = group_rows(rows)
        titles = told_apart(found, [group.title for group in found])
        groups[device] = dict(zip(titles, found, strict=True))
    return [
        (
            title,
            ["kernel", *map(printable, groups)],
            _lines([each[title] for each in groups.values()]),
        )
        for title in dict.fromkeys(title for each in groups.values() for title in each)
    ]


def _lines(groups: Sequence[Group]) -> list[list[str]]:
    """Return a table line for each kernel, with one cell per device."""
    ran = [
        kernel
        for kernel in dict.fromkeys(kernel for group in groups for kernel in group.rows)
        if any(row.accuracy for group in groups for row in group.rows.get(kernel, ()))
    ]
    last = (True, float("inf"))
    ran.sort(key=lambda kernel: [rank(g, kernel) if kernel in g.rows else last for g in groups])
    marked = [(group, _marks(group)) for group in groups]
    return [
        [printable(str(kernel)), *(_cell(group, marks, kernel) for group, marks in marked)]
        for kernel in ran
    ]


def _cell(group: Group, marks: dict[KernelId, str], kernel: KernelId) -> str:
    if kernel not in group.rows:
        return "not replayed"
    rows = group.rows[kernel]
    wrong = next((row.status for row in rows if not row.is_correct), "")
    return wrong or f"{cell(SPEEDUP, group, kernel)} {marks.get(kernel, '')}".strip()


def _marks(group: Group) -> dict[KernelId, str]:
    """Return a mark for each class's fastest kernel and for the kernels that tie with it."""
    marks: dict[KernelId, str] = {}
    for found in (fastest(group, "exact"), fastest(group, "quantised")):
        if found is not None:
            marks |= {found.kernel: "fastest", **dict.fromkeys(found.ties, "tied")}
            marks |= dict.fromkeys(found.undecided, "inconclusive")
    return marks
