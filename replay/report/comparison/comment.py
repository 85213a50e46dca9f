"""Comparisons as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence

from capture.text.counted import counted
from capture.text.printable import printable
from replay.comparison.comparison import Comparison, smallest_slowdown
from replay.comparison.conditions import Condition
from replay.comparison.speed_change import ratio_text
from replay.report.comparison.change_matrix import (
    Change,
    ChangeCell,
    ChangeMatrix,
    change_matrix,
)
from replay.report.comparison.markdown import escaped, markdown_table, plain_table
from replay.report.comparison.sections import (
    LINES,
    Sections,
    Table,
    in_order,
    sections,
    undecided_rows,
)
from replay.report.groups import told_apart
from replay.rows.row import KernelId

BUDGET = 65_000
"""Maximum size of the text in bytes; GitHub accepts 65,536 characters in a comment."""

NOTES = 10
"""Maximum number of sentences on how two runs were compared."""

SENTENCE = 600
"""Maximum length of the verdict and of a sentence of the doctor, in characters."""

KINDS = 12
"""Maximum number of columns of the matrix, which are named A to L."""

BARS = 12
"""Maximum number of bars in the chart."""

BLUE_AND_ORANGE = "#0072b2, #d55e00"
"""Colours of the chart's bars and line, on light and dark pages."""

MARKS: dict[Change, tuple[str, str]] = {
    "broken": ("💥", "ran before"),
    "now wrong": ("**✗ now**", "wrong now, correct before"),
    "wrong": ("✗", "wrong in both"),
    "mended": ("✓ now", "failing or wrong before, correct now"),
    "same": ("=", "same speed"),
    "undecided": ("?", "undecided"),
    "cannot run": ("–", "cannot run"),
    "not timed": ("·", "not timed in both"),
}
"""Mark and meaning of the changes that are not a ratio of speeds."""

CIRCLES: dict[Change, str] = {"slower": "🔴", "faster": "🟢"}


def to_markdown(
    compared: Sequence[Comparison],
    findings: Sequence[Mapping[KernelId, str]] = (),
    conditions: Sequence[Condition] = (),
) -> str:
    """Format comparisons in order; omit table lines if the text would be too long.

    Names from the rows are escaped, so they cannot become Markdown, HTML, mentions or links.

    Args:
        findings: for each comparison, the doctor's sentences on kernels that became wrong.
        conditions: those of `--fail-on`, which say how large a slowdown matters.
    """
    said = findings or [{}] * len(compared)
    for lines in (LINES, LINES // 4, 0):
        text = "".join(
            _comparison(comparison, sections(comparison, conditions), sentences, lines)
            for comparison, sentences in zip(compared, said, strict=True)
        )
        if len(text.encode()) <= BUDGET:
            break
    return text


def _comparison(
    comparison: Comparison, contents: Sections, findings: Mapping[KernelId, str], lines: int
) -> str:
    found = change_matrix(comparison)
    shown = _columns(found)
    smallest = smallest_slowdown(comparison)
    notes = [escaped(note) for note in contents.notes if note != smallest]
    open_rows = undecided_rows(comparison)
    parts = [
        _head(contents, findings),
        *_matrix(found, shown, in_order(comparison), lines),
        f"{escaped(smallest[0].upper() + smallest[1:])}\n" if smallest else "",
        _chart(found, shown),
        _folded(counted(len(open_rows.lines), "undecided row"), _table(open_rows, lines)),
        *(_folded(table.title, _table(table, lines)) for table in contents.tables),
        _folded("how the runs were compared", "".join(f"- {note}\n" for note in notes[:NOTES])),
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _head(contents: Sections, findings: Mapping[KernelId, str]) -> str:
    """Return the title, the verdict, what the doctor found, and the machine."""
    sign = "🔴" if contents.is_worse else "🟡" if contents.is_undecided else "🟢"
    said = (f"{kernel}: {sentence}" for kernel, sentence in findings.items())
    return "\n".join(
        [
            f"### {escaped(contents.title)}\n",
            f"{sign} {escaped(contents.answer, SENTENCE)}\n",
            *(f"🩺 {escaped(printable(sentence), SENTENCE)}\n" for sentence in said),
            f"{escaped(contents.machine)}\n",
        ]
    )


def _columns(found: ChangeMatrix) -> list[int]:
    """Return the kinds of call to show, those with a change first."""
    usual = ("same", "reference kernel", "cannot run", "wrong", "not timed", "undecided")
    changed = {at for (_, at), cell in found.cells.items() if cell.change not in usual}
    return sorted(range(len(found.kinds)), key=lambda at: at not in changed)[:KINDS]


def _matrix(
    found: ChangeMatrix, shown: Sequence[int], order: Sequence[KernelId], lines: int
) -> Iterator[str]:
    """Yield the matrix, the names of its columns, and the meaning of its marks."""
    kernels = order[:lines]
    if not kernels:
        return
    one = len(found.kinds) == 1
    headings = ["kernel", *("change of speed" if one else _letter(at) for at in range(len(shown)))]
    table = [
        [escaped(printable(str(kernel))), *(_text(found.cells.get((kernel, at))) for at in shown)]
        for kernel in kernels
    ]
    yield plain_table([headings, *table])
    titles = told_apart(found.kinds, [kind.title for kind in found.kinds])
    left_out = [
        f"{counted(len(items) - len(some), word)} left out\n"
        for items, some, word in ((order, kernels, "kernel"), (found.kinds, shown, "kind of call"))
        if len(items) > len(some)
    ]
    yield "".join(
        f"- {'' if one else f'**{_letter(place)}** '}{escaped(titles[at])}\n"
        for place, at in enumerate(shown)
    )
    changes = {cell.change for cell in found.cells.values()}
    marks = [f"{mark} {meaning}" for of, (mark, meaning) in MARKS.items() if of in changes]
    circles = [f"{mark} {of}" for of, mark in CIRCLES.items() if of in changes]
    yield " · ".join([*circles, *marks]) + "\n"
    yield from left_out


def _letter(at: int) -> str:
    return string.ascii_uppercase[at]


def _text(cell: ChangeCell | None) -> str:
    if cell is None:
        return ""
    if cell.speed and cell.change in CIRCLES:
        return f"{CIRCLES[cell.change]} {ratio_text(cell.speed.ratio)}"
    mark, _ = MARKS.get(cell.change, (cell.change, ""))
    return f"{mark} {cell.reason}".strip()


def _chart(found: ChangeMatrix, shown: Sequence[int]) -> str:
    """Return a Mermaid chart of the largest changes of speed; empty without a change.

    GitHub draws Mermaid in comments, but no SVG: a comment cannot hold a file, and a link to one
    would need a place to upload it.
    """
    changed = [
        (kernel, at, cell.speed.ratio)
        for (kernel, at), cell in found.cells.items()
        if cell.speed and cell.change in CIRCLES and at in shown
    ]
    if not changed:
        return ""
    largest = sorted(changed, key=lambda each: -abs(math.log(each[2])))[:BARS]
    bars = sorted(largest, key=lambda each: each[2])
    names = []
    for kernel, at, _ in bars:
        kind = "" if len(found.kinds) == 1 else f" {_letter(shown.index(at))}"
        names.append(f'"{_mermaid_name(str(kernel))}{kind}"')
    look = {
        "xyChart": {"height": 100 + 40 * len(bars)},
        "themeVariables": {"xyChart": {"plotColorPalette": BLUE_AND_ORANGE}},
    }
    ratios = [f"{ratio:.3f}" for *_, ratio in bars]
    return "\n".join(
        [
            "```mermaid",
            f"%%{{init: {json.dumps(look)}}}%%",
            "xychart-beta horizontal",
            '    title "speed after / before (line: no change)"',
            f"    x-axis [{', '.join(names)}]",
            f'    y-axis "×" 0 --> {max(1.0, *(ratio for *_, ratio in bars)) * 1.1:.2f}',
            f"    bar [{', '.join(ratios)}]",
            f"    line [{', '.join(['1'] * len(bars))}]",
            "```\n",
        ]
    )


def _mermaid_name(name: str) -> str:
    """Return a name without the characters that have a meaning in Mermaid, of 30 at most."""
    return re.sub(r"[^\w./:-]+", " ", name).strip()[-30:]


def _table(table: Table, lines: int) -> str:
    if not table.lines:
        return ""
    left_out = len(table.lines) - lines
    return markdown_table([table.headings, *table.lines[:lines]]) + (
        f"\nand {left_out} more\n" if left_out > 0 else ""
    )


def _folded(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<details><summary>{escaped(title)}</summary>\n\n{body}\n</details>\n"
