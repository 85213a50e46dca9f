"""`replay random`: runs every kernel on one call of any shape, with random values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.cli import shared_options as options
from replay.cli.requests import random_call, request_of
from replay.cli.showing import show

EXAMPLES = """\
  replay random -b 2 -hq 24 -sq 4250 -d 64
  replay random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128            one decoded token, grouped heads
  replay random -sq 4096 --distribution sink --mask padding
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay random`."""
    command = options.verb(
        "random", "Run attention kernels on one call of any shape, with random values.", EXAMPLES
    )
    what = command.add_argument_group("the call")
    options.add_shape(what)
    options.add_values(what, command)
    how = command.add_argument_group("how to measure, and where")
    options.add_kernels(how)
    options.add_timing(how)
    options.add_place(how)
    shown = command.add_argument_group("what to show and write")
    options.add_metric(shown)
    options.add_json(shown, resume=False)
    options.add_report(shown)
    options.add_saved_output(shown)
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
    return show(arguments, parser(), lambda: request_of(arguments, random_call(arguments)))
