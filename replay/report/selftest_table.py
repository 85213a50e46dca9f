"""Table of a self-test in 80 columns: one line per check, then the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from replay.report.fitted import FittedTable
from replay.selftest.all_checks import SelftestReport

PASSED = {True: Text("pass", "green"), False: Text("FAIL", "bold red"), None: Text("-", "dim")}


def print_selftest(verdict: SelftestReport, console: Console) -> None:
    """Print a table of the checks, then a summary of all checks."""
    machine = verdict.machine
    cuda = f" · cuda {machine.cuda}" if machine.cuda else ""
    console.print(Text(f"{machine.device} · torch {machine.torch}{cuda}", "bold"))
    table = FittedTable("check", "", "found")
    for result in verdict.results:
        table.add_row(Text(result.name), PASSED[result.passed], Text(result.finding))
    console.print(table)
    console.print(Text(verdict.sentence, "bold" if verdict.passed else "bold red"))
