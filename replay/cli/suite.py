"""`replay suite`: runs every kernel on a published list of shapes, with random values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from capture.command_line.parser import OneSentenceParser, positive
from capture.command_line.verbosity import narrated
from replay.cli import shared_options as options
from replay.cli.requests import request_of, suite_calls
from replay.cli.showing import show

EXAMPLES = """\
  replay suite llama
  replay suite sage --max-seq 8192 --json rows.jsonl
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay suite`."""
    command = options.verb(
        "suite",
        "Run attention kernels on a published list of shapes, with random values.",
        EXAMPLES,
    )
    what = command.add_argument_group("the calls")
    what.add_argument(
        "suite", choices=options.SUITES, metavar="NAME", help=", ".join(options.SUITES)
    )
    what.add_argument("--max-seq", type=positive, metavar="N", help="skip longer shapes")
    options.add_values(what, command)
    how = command.add_argument_group("how to measure, and where")
    options.add_kernels(how)
    options.add_timing(how)
    options.add_limits(how)
    options.add_place(how, several=True)
    shown = command.add_argument_group("what to show and write")
    options.add_metric(shown)
    options.add_errors_against(shown)
    options.add_json(shown)
    options.add_report(shown)
    options.add_check(shown)
    options.add_common(shown)
    return command


def run(argv: Sequence[str]) -> int:
    """Replay, print and write; return 1 if `--check` fails.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    return show(arguments, parser(), lambda: request_of(arguments, suite_calls(arguments)))
