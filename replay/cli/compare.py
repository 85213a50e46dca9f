"""`replay compare`: what changed between runs, read from files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from capture.command_line.parser import Listed, OneSentenceParser
from capture.text.printable import printable
from replay.api.compare_rows import ComparedRuns, compare, run_of
from replay.cli import shared_options as options
from replay.cli.files import (
    UsageError,
    check_place,
    noted,
    opened,
    say_unwritten,
    shared_file,
)
from replay.comparison.conditions import CONDITIONS, Condition, failures, read_conditions
from replay.report.comparison.markdown import to_markdown
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import Sections, sections
from replay.rows.row_files import plain

WRITTEN = ("markdown", "json")

EXAMPLES = """\
  replay compare before.jsonl after.jsonl               what became faster, slower or wrong?
  replay compare before.jsonl a.jsonl b.jsonl           each against the first
  replay compare before.jsonl after.jsonl --fail-on slow:3%,inaccurate --markdown comment.md
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay compare`."""
    command = options.verb(
        "compare",
        "Compare runs that `replay --json` wrote: speed and accuracy of the same kernel\n"
        "on the same call.",
        EXAMPLES,
    )
    command.add_argument("before", metavar="BEFORE", help="the file of rows to compare with")
    command.add_argument("after", metavar="AFTER", nargs="+", help="files of rows")
    command.add_argument(
        "--of",
        choices=["speed-up", "time"],
        help="what to compare (default: speed-ups over the baseline, which drift of the machine "
        "does not change; times if the baseline's own version changed)",
    )
    command.add_argument(
        "--spread",
        metavar="WHAT",
        help="how far two equal runs differ: a share (1.5%%), or the rows of a second run of "
        "BEFORE (default: 0)",
    )
    command.add_argument(
        "--fail-on",
        action=Listed,
        metavar="A,B",
        help=f"exit with 1 if one holds: {', '.join(CONDITIONS)}; slow:3%% only by more than 3 %%",
    )
    options.add_markdown(command)
    options.add_json(command, resume=False, what="every row of it as JSON")
    options.add_common(command, verbosity=False)
    command.add_version()
    return command


def run(argv: Sequence[str]) -> int:
    """Compare runs, print and write the changes; return 1 if a condition of `--fail-on` is met.

    Raises:
        UsageError: the arguments cannot be used.
        ComparisonError: the runs cannot be compared.
        RowsError: a file cannot be read.
    """
    arguments = parser().parse_args(argv)
    if wrong := _misuse(arguments):
        raise UsageError(wrong)
    for option in WRITTEN:
        check_place(getattr(arguments, option))
    conditions = read_conditions(arguments.fail_on)
    after = [run_of(name) for name in arguments.after]
    before = run_of(arguments.before)
    compared = [compare(before, run, of=arguments.of, spread=arguments.spread) for run in after]
    unwritten: list[str] = []
    _show(compared, arguments, unwritten)
    return max(_exit_code(compared, conditions), say_unwritten(unwritten))


def _show(
    compared: Sequence[ComparedRuns], arguments: argparse.Namespace, unwritten: list[str]
) -> None:
    """Write and print comparisons."""
    said = [sections(comparison) for comparison in compared]
    formats: dict[str, Callable[[], str]] = {
        "markdown": lambda: to_markdown(said),
        "json": lambda: json.dumps(plain([one.to_json() for one in compared]), indent=1) + "\n",
    }
    places = {name: getattr(arguments, name) for name in formats}
    try:
        # Files are written before stdout, whose reader may be gone.
        for name in sorted(formats, key=lambda name: places[name] == "-"):
            with noted(unwritten), opened(places[name]) as file:
                if file is not None:
                    file.write(formats[name]())
    finally:
        _print(said, Console(highlight=False, stderr="-" in places.values()))


def _print(said: Sequence[Sections], console: Console) -> None:
    """Print comparisons below each other."""
    for number, parts in enumerate(said):
        if number:
            console.print()
        print_comparison(parts, console)


def _exit_code(compared: Sequence[ComparedRuns], conditions: Sequence[Condition]) -> int:
    """Print the conditions that are met to stderr; return 1 if there are any."""
    failed = failures(compared, conditions)
    if failed:
        print(f"replay: failed: {printable('; '.join(failed))}", file=sys.stderr)
    return 1 if failed else 0


def _misuse(arguments: argparse.Namespace) -> str:
    """Return a sentence about arguments that contradict each other; empty if there are none."""
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
    return shared_file(arguments, ("spread",), WRITTEN)
