"""`replay compare`: what changed between runs, read from files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console

from capture.text.printable import printable
from replay.api.compare_rows import ComparedRuns, compare, earlier_run, run_of
from replay.cli.comparison_arguments import parser
from replay.cli.files import (
    UsageError,
    check_place,
    noted,
    opened,
    say_unwritten,
    shared_file,
)
from replay.comparison.baselines import load, machine_of, place, save
from replay.comparison.conditions import Condition, failures, read_conditions
from replay.comparison.row_matching import Run
from replay.comparison.spread import read_spread
from replay.report.comparison.markdown import to_markdown
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import Sections, sections
from replay.rows.row import Machine, Row
from replay.rows.row_files import plain

WRITTEN = ("markdown", "json")


def run(argv: Sequence[str]) -> int:
    """Compare runs, print and write what changed; return 1 if a condition of `--fail-on` holds.

    Raises:
        UsageError: the arguments cannot be used.
        ComparisonError: the runs cannot be compared.
        RowsError: a file cannot be read.
    """
    arguments = parser().parse_args(argv)
    if wrong := _twice(arguments) or shared_file(arguments, ("spread",), WRITTEN):
        raise UsageError(wrong)
    for option in WRITTEN:
        check_place(getattr(arguments, option))
    conditions = read_conditions(arguments.fail_on)
    after = [run_of(name) for name in arguments.after]
    machine = machine_of(after[-1].rows)
    _check_baseline(arguments.save_baseline, machine)
    before = earlier_run(arguments.before, after[0])
    compared = [compare(before, run, of=arguments.of, spread=arguments.spread) for run in after]
    said = [sections(comparison) for comparison in compared]
    formats: dict[str, Callable[[], str]] = {
        "markdown": lambda: to_markdown(said),
        "json": lambda: json.dumps(plain([one.to_json() for one in compared]), indent=1) + "\n",
    }
    unwritten: list[str] = []
    if arguments.save_baseline is not None:
        with noted(unwritten):
            keep(arguments.save_baseline, after[-1].rows, machine)
    places = {name: getattr(arguments, name) for name in formats}
    try:
        # Files come before stdout, whose reader may be gone.
        for name in sorted(formats, key=lambda name: places[name] == "-"):
            with noted(unwritten), opened(places[name]) as file:
                if file is not None:
                    file.write(formats[name]())
    finally:
        print_all(said, Console(highlight=False, stderr="-" in places.values()))
    return max(exit_code(compared, conditions), say_unwritten(unwritten))


def keep(name: str, rows: Sequence[Row], machine: Machine) -> None:
    """Keep rows as a baseline, and print where.

    Raises:
        Error: it cannot be written.
    """
    path = save(name, rows, machine)
    print(f"baseline {printable(name)} of {printable(machine.device)}: {path}", file=sys.stderr)


def _check_baseline(name: str | None, machine: Machine) -> None:
    """Check before any work that a baseline can be kept.

    Raises:
        ComparisonError: the name cannot be used, or its directory cannot be made.
        UsageError: the file cannot be written.
    """
    if name is not None:
        check_place(place(name, machine))


class Earlier(NamedTuple):
    """The run that a replay is compared with, and how to judge the changes."""

    run: Run
    spread: str | None
    """The text of `--spread`."""
    conditions: list[Condition]


def read_earlier(arguments: argparse.Namespace, machine: Machine) -> Earlier | None:
    """Read what `replay --compare-to` names, before hours of measuring; None without it.

    Raises:
        ComparisonError: an option cannot be used.
        RowsError: a file cannot be read.
    """
    _check_baseline(arguments.save_baseline, machine)
    if arguments.compare_to is None:
        return None
    earlier = load(arguments.compare_to, machine)
    read_spread(arguments.spread, earlier)
    return Earlier(earlier, arguments.spread, read_conditions(arguments.fail_on))


def compare_with(earlier: Earlier, rows: Sequence[Row], console: Console) -> int:
    """Print what changed since an earlier run; return 1 if a condition of `--fail-on` holds.

    Raises:
        ComparisonError: the runs cannot be compared.
    """
    found = compare(earlier.run, Run("this run", rows), spread=earlier.spread)
    print_all([sections(found)], console)
    return exit_code([found], earlier.conditions)


def print_all(said: Sequence[Sections], console: Console) -> None:
    """Print comparisons one below the other."""
    for number, parts in enumerate(said):
        if number:
            console.print()
        print_comparison(parts, console)


def exit_code(compared: Sequence[ComparedRuns], conditions: Sequence[Condition]) -> int:
    """Print the conditions that hold to stderr; return 1 if there is one."""
    failed = failures(compared, conditions)
    if failed:
        print(f"replay: failed: {printable('; '.join(failed))}", file=sys.stderr)
    return 1 if failed else 0


def _twice(arguments: argparse.Namespace) -> str:
    """Return a sentence about a file that is named twice; empty if there is none."""
    names = [arguments.before, *arguments.after]
    read: dict[str, str] = {}
    for name in names:
        other = read.setdefault(os.path.realpath(name), name)
        if other is not name:
            same = name if other == name else f"{other} and {name}"
            return f"{same} is the same file twice: name two runs"
    for option in WRITTEN:
        given = getattr(arguments, option)
        if given not in (None, "-") and os.path.realpath(given) in read:
            return f"--{option} would overwrite {given}: name another file"
    return ""
