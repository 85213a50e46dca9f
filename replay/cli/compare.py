"""`replay compare`: reports the changes between runs, whose rows it reads from files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console

from capture.command_line.parser import Listed
from replay.api.call_choices import RecordedCalls
from replay.api.compare_rows import ComparedRuns, compare, run_of
from replay.api.messages import say
from replay.api.wrong_kernels import examined
from replay.cli.files import (
    INCONCLUSIVE,
    UsageError,
    check_files,
    noted,
    opened,
    output_file,
    say_unwritten,
)
from replay.cli.shared_options import VerbParser
from replay.cli.stdout import reserved_stdout
from replay.comparison.conditions import CONDITIONS, Condition, failures, read_conditions
from replay.comparison.undecided import sentences
from replay.report.comparison.annotations import workflow_commands
from replay.report.comparison.comment import to_markdown
from replay.report.comparison.junit import to_junit
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import sections
from replay.rows.row import KernelId
from replay.rows.row_files import plain

EXAMPLES = """\
  replay compare before.jsonl after.jsonl               what became faster, slower or wrong?
  replay compare before.jsonl a.jsonl b.jsonl           each against the first
  replay compare before.jsonl after.jsonl --fail-on slow:3%,inaccurate --markdown comment.md
  replay compare before.jsonl after.jsonl --fail-on slow:3% --junit compared.xml
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
    command.add(
        "--markdown",
        help="write a comment for a pull request: verdict, matrix, chart (- for stdout)",
    )
    command.add_argument(
        "--junit",
        metavar="FILE",
        type=output_file,
        help="write JUnit XML, in which --fail-on decides what fails (- for stdout)",
    )
    command.add_argument(
        "--doctor",
        metavar="DIR",
        help="recording of the calls: say in --markdown why a kernel became wrong",
    )
    command.add("--json", help="write all comparisons as JSON (- for stdout)")
    command.add_common()
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
    findings = _findings(compared, arguments.doctor)
    unwritten: list[str] = []
    _show(compared, conditions, findings, arguments, unwritten)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(compared, conditions, findings):
            print(line, file=sys.stderr)  # GitHub reads both streams
    failed, unclear = failures(compared, conditions), sentences(compared, conditions)
    parts = (("failed", failed), ("undecided", unclear))
    if said := [f"{word}: {'; '.join(found)}" for word, found in parts if found]:
        say("; ".join(said))
    code = max(1 if failed else 0, say_unwritten(unwritten))
    return INCONCLUSIVE if unclear and not code else code


def _show(
    compared: Sequence[ComparedRuns],
    conditions: Sequence[Condition],
    findings: Sequence[Mapping[KernelId, str]],
    arguments: argparse.Namespace,
    unwritten: list[str],
) -> None:
    """Write comparisons to files, and print them one below the other."""
    found = [sections(comparison, conditions) for comparison in compared]
    formats: dict[str, Callable[[], str]] = {
        "markdown": partial(to_markdown, compared, findings, conditions),
        "junit": partial(to_junit, compared, conditions),
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


def _findings(compared: Sequence[ComparedRuns], recording: str | None) -> list[dict[KernelId, str]]:
    """Return the doctor's sentences by kernel for each comparison; none without a recording."""
    if recording is None:
        return []
    with reserved_stdout():
        return [examined(comparison, recording) for comparison in compared]


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError if options do not fit, a run is named twice, or no file can be written."""
    if arguments.junit is not None and arguments.fail_on is None:
        raise UsageError("--junit requires --fail-on, which decides what fails")
    if arguments.doctor is not None:
        if arguments.markdown is None:
            raise UsageError("--doctor adds to the comment: give --markdown FILE")
        RecordedCalls(arguments.doctor).check()
    read: dict[str, str] = {}
    for name in (arguments.before, *arguments.after):
        other = read.setdefault(os.path.realpath(name), name)
        if other is not name:
            same = name if other == name else f"{other} and {name}"
            raise UsageError(f"{same} is the same file twice: name two runs")
    check_files(arguments)
