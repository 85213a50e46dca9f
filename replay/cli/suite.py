"""`replay suite`: runs kernels on a list of shapes, with random values."""

from __future__ import annotations

import argparse

from capture.command_line.parser import positive
from replay.api.call_choices import SuiteCalls
from replay.cli.replayed import show
from replay.cli.requests import chosen
from replay.cli.shared_options import DEVICES, TIMING, VALUES, WAITING, VerbParser
from replay.workloads.call_sizes import SUITES

EXAMPLES = """\
  replay suite llama
  replay suite sage --max-seq 8192 --json rows.jsonl
  replay suite my_shapes.toml                                 a file of shapes (docs/replaying.md)
"""


def parser() -> VerbParser:
    """Build the parser of `replay suite`."""
    command = VerbParser(
        "suite",
        "Run attention kernels on a published list of shapes, or on your own from a file, with\n"
        "random values.",
        EXAMPLES,
    )
    what = command.add_argument_group("the calls")
    what.add_argument(
        "suite", type=_suite, metavar="NAME", help=f"{', '.join(SUITES)}, or FILE.toml of your own"
    )
    what.add_argument(
        "--max-seq", type=positive, metavar="N", help="maximum length; longer shapes are left out"
    )
    command.add(*VALUES, to=what)
    how = ("--backward", *TIMING, "--baseline-kernel", "--max-time", DEVICES, "--env", WAITING)
    command.group("how to measure, and where", "--kernels", *how)
    shown = ("--details", "--metric", "--errors-against", "--json", "--resume", "--report")
    command.add_common(command.group("what to show and write", *shown, "--check"))
    return command


def _suite(given: str) -> str:
    if given in SUITES or given.endswith(".toml"):
        return given
    names = ", ".join(SUITES)
    raise argparse.ArgumentTypeError(
        f"no suite {given!r}: choose from {names}, or name a .toml file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, print and write rows; return 1 if `--check` fails."""
    return show(arguments, chosen(SuiteCalls, arguments))
