"""Comparison as plain text in 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from replay.report.comparison.sections import LINES, Sections
from replay.report.fitted import FittedTable


def print_comparison(contents: Sections, console: Console) -> None:
    """Print the summary, notes on the method of comparison, the counts and the changes."""
    console.print(Text(contents.title, "bold"))
    for note in contents.notes:
        console.print(Text(note, "dim"))
    console.print(Text(contents.answer, "bold red" if contents.is_worse else "bold"))
    for table in (contents.counts, *contents.tables):
        console.print()
        console.print(Text(table.title, "bold"))
        shown = FittedTable(*table.headings)
        for line in table.lines[:LINES]:
            shown.add_row(*map(Text, line))
        console.print(shown)
        if len(table.lines) > LINES:
            console.print(Text(f"and {len(table.lines) - LINES} more: --json", "dim"))
