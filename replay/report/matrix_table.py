"""First screen of a replay: the answer, the matrix of kernels and kinds of call, and reasons."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.report.answer import answer
from replay.report.crossover import crossover_lines
from replay.report.fitted import FittedTable
from replay.report.groups import Group, common_and_own
from replay.report.matrix import BUSY, MARKS, Matrix, Outcome, matrix
from replay.report.pooled import ranked_by, typical_time
from replay.rows.row import KernelId, Row
from replay.timing.defaults import ROUNDS

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

REMEDIES = {
    BUSY: "use a quieter machine",
    "too few rounds": f"--rounds {ROUNDS}",
    "interval too wide": "more --rounds and --max-seconds",
}
"""Remedy of each reason for an inconclusive speed-up."""

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
    common, titles = common_and_own(found.kinds)
    if common:
        console.print(Text(f"every kind of call: {common}", "dim"))
    for letter, kind, name in zip(letters, found.kinds, titles, strict=True):
        title = Text(f"{letter}  " if letter else "", "cyan").append(name, "default")
        time = _baseline_time(kind)
        console.print(title.append(f" · {time}" if time else "", "dim default"))
    shown = [kernel for kernel in found.kernels if not found.is_unavailable(kernel)]
    tried = found.tried
    wanted = max((len(_label(found, kernel)) for kernel in tried), default=0)
    at_once = max(1, (console.width - min(wanted, console.width // 2) - 2) // 8)
    for first in range(0, len(letters) if tried else 0, at_once):
        table = FittedTable("kernel")
        for letter in letters[first : first + at_once]:
            table.add_column(letter or "speed-up", justify="right", no_wrap=True)
        for kernel in tried:
            cells = found.row(kernel)[first : first + at_once]
            table.add_row(
                Text(_label(found, kernel)),
                *(Text(cell.text, STYLES.get(cell.outcome, "")) for cell in cells),
            )
        console.print(table)
    for sentence in crossover_lines(found):
        console.print(Text(printable(sentence)))
    outcomes = {cell.outcome for kernel in shown for cell in found.row(kernel)}
    marks = [f"{mark} {text}" for of, (mark, text) in MARKS.items() if of in outcomes]
    if marks:
        console.print(Text("  ".join(marks), "dim"))
    reasons = list(_reasons(found, shown, letters))
    for line in reasons[:REASONS]:
        console.print(line)
    if len(reasons) > REASONS:
        console.print(Text(f"{len(reasons) - REASONS} more reasons: --details", "dim"))
    missing = [kernel for kernel in found.kernels if kernel not in shown]
    if 0 < len(missing) <= FEW:
        for line in _reasons(found, missing, letters):
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
    if not (kernel and time):
        return ""
    both = " forward and backward" if ranked_by(kind.rows[kernel]) == "both_ms" else ""
    return f"{kind.baseline} {time.p50:.4g} ms{both}"


def _label(found: Matrix, kernel: KernelId) -> str:
    return printable(found.label(kernel))


def _reasons(found: Matrix, shown: Sequence[KernelId], letters: Sequence[str]) -> Iterator[Text]:
    for outcome, names, reason in found.reasons(shown, letters):
        mark = Text(MARKS[outcome][0], STYLES[outcome])
        remedy = f": {REMEDIES[reason]}" if reason in REMEDIES else ""
        yield mark.append(printable(f" {names}: {reason}{remedy}"), "not bold default")
