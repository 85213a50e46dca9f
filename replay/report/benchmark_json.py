"""Times for github-action-benchmark, which draws them commit by commit.

Its tool `customSmallerIsBetter` takes a list of name, value, unit and, as text, range and extra
(https://github.com/benchmark-action/github-action-benchmark).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from capture.text.counted import counted
from capture.text.printable import printable
from replay.report.cells import speedup_text
from replay.report.groups import group_rows, told_apart
from replay.report.pooled import pooled_speedup, typical_time
from replay.rows.row import Row


class Entry(TypedDict):
    """One point of a chart."""

    name: str
    unit: str
    value: float
    range: str
    extra: str


def benchmark_entries(rows: Sequence[Row]) -> list[Entry]:
    """Return the median time over calls of each kernel that is correct on a group of calls.

    The range is from p10 to p90; `extra` names the speed-up over the baseline and the machine.
    """
    entries: list[Entry] = []
    groups = group_rows(rows)
    titles = told_apart(groups, [group.title for group in groups])
    for group, title in zip(groups, titles, strict=True):
        for kernel, members in group.rows.items():
            time = typical_time(members)
            if time is None or not all(row.is_correct for row in members):
                continue
            speedup = None if kernel.name == group.baseline else pooled_speedup(group, kernel)
            extra = [counted(len(members), "call"), members[0].machine.device]
            if speedup is not None:
                extra.insert(0, f"{speedup_text(speedup)} vs {group.baseline}")
            entries.append(
                Entry(
                    name=printable(f"{kernel} · {title}"),
                    unit="ms",
                    value=time.p50,
                    range=f"{time.p10:.4g}-{time.p90:.4g}",
                    extra=printable(", ".join(filter(None, extra))),
                )
            )
    return entries
