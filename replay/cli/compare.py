"""`replay compare`: two or more runs, read from files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from capture.text.printable import printable
from replay.cli.comparison_arguments import parser
from replay.cli.files import (
    UsageError,
    check_place,
    noted,
    opened,
    say_unwritten,
    shared_file,
)
from replay.comparison.baselines import as_run, is_file, load, machine_of, place, save
from replay.comparison.comparison import Comparison, basis_of, compare, to_json
from replay.comparison.conditions import Condition, failures, read_conditions
from replay.comparison.row_matching import Run
from replay.comparison.speed_change import Basis
from replay.comparison.spread import read_spread
from replay.report.comparison.markdown import to_markdown
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import Sections, sections
from replay.rows.row import Machine, Row
from replay.rows.row_files import plain, read_jsonl

WRITTEN = ("markdown", "json")


def run(argv: Sequence[str]) -> int:
    """Compare, print and write; 1 if a condition of `--fail-on` holds.

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
    after = [read_run(name) for name in arguments.after]
    machine = machine_of(after[-1].rows)
    _check_baseline(arguments.save_baseline, machine)
    before = _before(arguments.before, after[0])
    compared = [_compared(before, each, arguments.spread, arguments.of) for each in after]
    said = [sections(each) for each in compared]
    formats: dict[str, Callable[[], str]] = {
        "markdown": lambda: to_markdown(said),
        "json": lambda: json.dumps(plain([to_json(each) for each in compared]), indent=1) + "\n",
    }
    unwritten: list[str] = []
    if arguments.save_baseline is not None:
        with noted(unwritten):
            keep(arguments.save_baseline, after[-1].rows, machine)
    places = {name: getattr(arguments, name) for name in formats}
    try:
        for name in sorted(formats, key=lambda each: places[each] == "-"):  # it may have no reader
            with noted(unwritten), opened(places[name]) as file:
                if file is not None:
                    file.write(formats[name]())
    finally:
        print_all(said, Console(highlight=False, stderr="-" in places.values()))
    return max(exit_code(compared, conditions), say_unwritten(unwritten))


def keep(name: str, rows: Sequence[Row], machine: Machine) -> None:
    """Keep rows as a baseline, and say where.

    Raises:
        Error: it cannot be written.
    """
    path = save(name, rows, machine)
    print(f"baseline {printable(name)} of {printable(machine.device)}: {path}", file=sys.stderr)


def _check_baseline(name: str | None, machine: Machine) -> None:
    """Find out before any work whether a baseline can be kept.

    Raises:
        ComparisonError: its name cannot be one, or has no directory.
        UsageError: its file cannot be written.
    """
    if name is not None:
        check_place(place(name, machine))


class Earlier(NamedTuple):
    """What a replay is compared with, and how."""

    run: Run
    spread: str | None
    """As it was given."""
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
    """Print what changed since an earlier run; 1 if a condition of `--fail-on` holds.

    Raises:
        ComparisonError: the runs cannot be compared.
    """
    found = _compared(earlier.run, Run("this run", rows), earlier.spread, None)
    print_all([sections(found)], console)
    return exit_code([found], earlier.conditions)


def _compared(before: Run, after: Run, spread: str | None, of: Basis | None) -> Comparison:
    basis = of or basis_of(before, after)
    return compare(before, after, read_spread(spread, before, basis), basis)


def print_all(said: Sequence[Sections], console: Console) -> None:
    """Print comparisons one below the other."""
    for at, each in enumerate(said):
        if at:
            console.print()
        print_comparison(each, console)


def exit_code(compared: Sequence[Comparison], conditions: Sequence[Condition]) -> int:
    """Say on stderr what fails; 1 if anything does."""
    failed = failures(compared, conditions)
    if failed:
        print(f"replay: failed: {printable('; '.join(failed))}", file=sys.stderr)
    return 1 if failed else 0


def _twice(arguments: argparse.Namespace) -> str:
    """Say which file is named where another belongs; empty if none is."""
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


def _before(name: str, after: Run) -> Run:
    """The earlier run: a file, or the baseline of that name of the machine of `after`."""
    if is_file(name) or Path(name).exists():
        return read_run(name)
    return load(name, machine_of(after.rows))


def read_run(name: str) -> Run:
    """A run that `replay --json` wrote.

    Raises:
        UsageError: there is no such file.
        RowsError: it cannot be read.
    """
    try:
        return as_run(name, read_jsonl(Path(name)))
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file; write one with `replay --json`") from None
