"""First screen of a replay: the answer, the matrix of kernels and kinds of call, and reasons."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.report.answer import answer
from replay.report.fitted import FittedTable
from replay.report.groups import Group, names_by_sentence, told_apart
from replay.report.matrix import Cell, Matrix, Outcome, matrix
from replay.report.pooled import typical_time
from replay.rows.row import KernelId, Row

MARKS: dict[Outcome, tuple[str, str]] = {
    "same": ("=", "same speed"),
    "wrong": ("✗", "wrong"),
    "inconclusive": ("?", "inconclusive"),
    "cannot": ("–", "cannot run"),
}
"""Mark and meaning of the outcomes that show no speed-up."""

STYLES: dict[Outcome, str] = {
    "faster": "green",
    "slower": "red",
    "wrong": "bold red",
    "inconclusive": "yellow",
    "cannot": "dim",
    "baseline": "dim",
}

FEW = 3
"""Number of kernels that are not available here up to which each has its reason."""

REASONS = 6
"""Maximum number of lines of reasons; `--details` shows the others."""


def print_first_screen(rows: Sequence[Row], console: Console, heading: str) -> None:
    """Print the answer, a heading, the matrix, and reasons for wrong and missing results."""
    found = matrix(rows)
    if sentence := answer(found):
        console.print(Text(sentence, "bold"))
    console.print(Text(heading, "dim"))
    if not found.kernels:
        return
    console.print()
    letters = [_letters(at) for at in range(len(found.kinds))] if len(found.kinds) > 1 else [""]
    titles = told_apart(found.kinds, [kind.title for kind in found.kinds])
    for letter, kind, name in zip(letters, found.kinds, titles, strict=True):
        title = Text(f"{letter}  " if letter else "", "cyan").append(name, "default")
        console.print(title.append(_baseline_time(kind), "dim default"))
    shown = [kernel for kernel in found.kernels if not _is_unavailable(found, kernel)]
    wanted = max((len(_label(found, kernel)) for kernel in shown), default=0)
    at_once = max(1, (console.width - min(wanted, console.width // 2) - 2) // 8)
    for first in range(0, len(letters), at_once):
        table = FittedTable("kernel")
        for letter in letters[first : first + at_once]:
            table.add_column(letter or "speed-up", justify="right", no_wrap=True)
        for kernel in shown:
            cells = found.row(kernel)[first : first + at_once]
            table.add_row(Text(_label(found, kernel)), *map(_shown, cells))
        console.print(table)
    outcomes = {cell.outcome for kernel in shown for cell in found.row(kernel)}
    marks = [f"{mark} {text}" for of, (mark, text) in MARKS.items() if of in outcomes]
    if marks:
        console.print(Text("  ".join(marks), "dim"))
    reasons = list(_reasons(found, shown))
    for line in reasons[:REASONS]:
        console.print(line)
    if len(reasons) > REASONS:
        console.print(Text(f"{len(reasons) - REASONS} more reasons: --details", "dim"))
    missing = [kernel for kernel in found.kernels if kernel not in shown]
    if 0 < len(missing) <= FEW:
        for line in _reasons(found, missing):
            console.print(line)
    elif missing:
        listed = f"{counted(len(missing), 'kernel')} not available here, listed by: replay kernels"
        console.print(Text(listed, "dim"))


def _letters(at: int) -> str:
    """Name a column A to Z, then A1, B1 and so on."""
    more, letter = divmod(at, 26)
    return string.ascii_uppercase[letter] + (str(more) if more else "")


def _baseline_time(kind: Group) -> str:
    kernel = next((kernel for kernel in kind.rows if kernel.name == kind.baseline), None)
    time = kernel and typical_time(kind.rows[kernel])
    return f" · {kind.baseline} {time.p50:.4g} ms" if time else ""


def _label(found: Matrix, kernel: KernelId) -> str:
    kind = found.class_of(kernel)
    return printable(str(kernel) if kind == "exact" else f"{kernel} ({kind})")


def _shown(cell: Cell) -> Text:
    if cell.outcome == "baseline":
        text = "baseline"
    elif cell.outcome in MARKS:
        text, _ = MARKS[cell.outcome]
    else:
        assert cell.speedup is not None
        text = f"{cell.speedup.ratio:.2f}×"
    return Text(text, STYLES.get(cell.outcome, ""))


def _is_unavailable(found: Matrix, kernel: KernelId) -> bool:
    """Return True if no kind of call ran a kernel because this machine lacks what it needs."""
    rows = (row for kind in found.kinds for row in kind.rows.get(kernel, ()))
    return all(row.status == "unavailable" for row in rows)


def _reasons(found: Matrix, shown: Sequence[KernelId]) -> Iterator[Text]:
    """Yield a line for each reason, with its kernels; sizes in it may differ from call to call."""
    for outcome in ("wrong", "cannot", "inconclusive"):
        first: dict[str, str] = {}
        pairs = [
            (str(kernel), first.setdefault(re.sub(r"[\d.]+", "", cell.reason), cell.reason))
            for kernel in shown
            for cell in found.row(kernel)
            if cell.outcome == outcome and cell.reason
        ]
        for reason, names in names_by_sentence(pairs).items():
            mark = Text(MARKS[outcome][0], STYLES[outcome])
            yield mark.append(printable(f" {names}: {reason}"), "not bold default")
