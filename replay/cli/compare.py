"""`replay compare`: reports the changes between runs, whose rows it reads from files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from capture.command_line.parser import Listed
from replay.api.compare_rows import ComparedRuns, compare, run_of
from replay.api.messages import say
from replay.cli.files import INCONCLUSIVE, UsageError, check_files, noted, opened, say_unwritten
from replay.cli.shared_options import VerbParser
from replay.comparison.conditions import CONDITIONS, failures, read_conditions, undecided
from replay.report.comparison.markdown import to_markdown
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import sections
from replay.rows.row_files import plain

EXAMPLES = """\
  replay compare before.jsonl after.jsonl               what became faster, slower or wrong?
  replay compare before.jsonl a.jsonl b.jsonl           each against the first
  replay compare before.jsonl after.jsonl --fail-on slow:3%,inaccurate --markdown comment.md
"""


def parser() -> VerbParser:
    """Build the parser of `replay compare`."""
    command = VerbParser(
        "compare",
        "Compare runs that `replay --json` wrote: speed and accuracy of the same kernel\n"
        "on the same call.",
        EXAMPLES,
    )
    command.add_argument("before", metavar="BEFORE", help="file of rows to compare with")
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
        help="difference between two equal runs: a share (1.5%%), or the rows of a second run of "
        "BEFORE (default: 0)",
    )
    command.add_argument(
        "--fail-on",
        action=Listed,
        metavar="A,B",
        help=f"exit with 1 on any of {', '.join(CONDITIONS)}; slow:3%% only by more than 3 %%; "
        "exit with 3 if noise hides the answer",
    )
    command.add("--markdown")
    command.add("--json", help="write all comparisons as JSON (- for stdout)")
    command.add_common(verbosity=False)
    command.add_version()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Compare runs, print and write the changes; return 1 if a `--fail-on` condition is met.

    The code is 3 if no condition is met, but one could not be decided.

    Raises:
        UsageError: the arguments cannot be used.
        ComparisonError: the runs cannot be compared.
        RowsError: a file cannot be read.
    """
    _check(arguments)
    conditions = read_conditions(arguments.fail_on)
    after = [run_of(name) for name in arguments.after]
    before = run_of(arguments.before)
    compared = [compare(before, run, of=arguments.of, spread=arguments.spread) for run in after]
    unwritten: list[str] = []
    _show(compared, arguments, unwritten)
    failed = failures(compared, conditions)
    unclear = [] if failed else undecided(compared, conditions)
    if failed:
        say(f"failed: {'; '.join(failed)}")
    if unclear:
        say(f"inconclusive: {'; '.join(unclear)}; more rounds or a quieter machine would decide")
    code = max(1 if failed else 0, say_unwritten(unwritten))
    return INCONCLUSIVE if unclear and not code else code


def _show(
    compared: Sequence[ComparedRuns], arguments: argparse.Namespace, unwritten: list[str]
) -> None:
    """Write comparisons to files, and print them one below the other."""
    found = [sections(comparison) for comparison in compared]
    formats: dict[str, Callable[[], str]] = {
        "markdown": partial(to_markdown, found),
        "json": lambda: json.dumps(plain([one.to_json() for one in compared]), indent=1) + "\n",
    }
    places = {name: getattr(arguments, name) for name in formats}
    try:
        # Write files before stdout: the reader of stdout may be gone, and the print would fail.
        for name in sorted(formats, key=lambda name: places[name] == "-"):
            with noted(unwritten), opened(places[name]) as file:
                if file is not None:
                    file.write(formats[name]())
    finally:
        console = Console(highlight=False, stderr="-" in places.values())
        for number, parts in enumerate(found):
            if number:
                console.print()
            print_comparison(parts, console)


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError if a run is named twice, or if a file cannot be written."""
    read: dict[str, str] = {}
    for name in (arguments.before, *arguments.after):
        other = read.setdefault(os.path.realpath(name), name)
        if other is not name:
            same = name if other == name else f"{other} and {name}"
            raise UsageError(f"{same} is the same file twice: name two runs")
    check_files(arguments)
