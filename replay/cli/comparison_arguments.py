"""Arguments of `replay compare`, and those that it shares with `replay`. Imports no torch."""

from __future__ import annotations

import argparse

from capture.command_line.parser import OneSentenceParser
from capture.command_line.repeated_options import Listed
from replay.cli.files import output_file
from replay.comparison.conditions import CONDITIONS

EXAMPLES = """examples:
  replay compare before.jsonl after.jsonl               what became faster, slower or wrong?
  replay compare before.jsonl a.jsonl b.jsonl           each against the first
  replay compare nightly after.jsonl                    with a baseline of this type of machine
  replay compare before.jsonl after.jsonl --spread again.jsonl
                                                        count in how two equal runs differ
  replay compare before.jsonl after.jsonl --fail-on slow:3%,inaccurate --markdown comment.md
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of `replay compare`."""
    command = OneSentenceParser(
        prog="replay compare",
        description="Compare runs that `replay --json` wrote: speed and accuracy of the\n"
        "same kernel on the same call.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("before", metavar="BEFORE", help="a file of rows, or a baseline's name")
    command.add_argument("after", metavar="AFTER", nargs="+", help="files of rows")
    command.add_argument(
        "--of",
        choices=["speed-up", "time"],
        help="what to compare (default: speed-ups over the baseline, which drift of the machine "
        "does not change; times where the baseline's own version changed)",
    )
    add_judging(command)
    command.add_argument(
        "--save-baseline", metavar="NAME", help="keep AFTER as the baseline of this name"
    )
    command.add_argument(
        "--markdown",
        type=output_file,
        metavar="FILE",
        help="write it for a pull request (- for stdout)",
    )
    command.add_argument(
        "--json", type=output_file, metavar="FILE", help="write every row of it (- for stdout)"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.add_version()
    return command


def add_judging(group: argparse._ActionsContainer) -> None:
    """Add what a comparison is judged by."""
    group.add_argument(
        "--spread",
        metavar="WHAT",
        help="how far two equal runs differ: a share (1.5%%), the --json of --selftest, or the "
        "rows of a second run of BEFORE",
    )
    group.add_argument(
        "--fail-on",
        action=Listed,
        metavar="A,B",
        help=f"exit with 1 if one holds: {', '.join(CONDITIONS)}; slow:3%% only by more than 3 %%",
    )


def add_baselines(parser: argparse.ArgumentParser) -> None:
    """Add to `replay` what keeps a run and compares with one that was kept."""
    group = parser.add_argument_group("compared with an earlier run")
    group.add_argument(
        "--save-baseline",
        metavar="NAME",
        help="keep the rows under this name for this type of machine, or in a file (x.jsonl)",
    )
    group.add_argument(
        "--compare-to", metavar="NAME", help="say what changed since that baseline, or file"
    )
    add_judging(group)


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why the arguments of `replay` do not combine; empty if they do."""
    for option in ("spread", "fail_on"):
        if getattr(arguments, option) is not None and arguments.compare_to is None:
            return f"--{option.replace('_', '-')} requires --compare-to"
    return ""
