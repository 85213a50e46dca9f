"""`replay random`: runs every kernel on one call of any shape, with random values."""

from __future__ import annotations

import argparse

from replay.api.call_choices import RandomCall
from replay.cli.replayed import show
from replay.cli.requests import chosen
from replay.cli.shared_options import SHAPE, TIMING, VALUES, WAITING, VerbParser

EXAMPLES = """\
  replay random -b 2 -hq 24 -sq 4250 -d 64
  replay random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128            one decoded token, grouped heads
  replay random -sq 4096 --distribution sink --mask padding
"""


def parser() -> VerbParser:
    """Build the parser of `replay random`."""
    command = VerbParser(
        "random", "Run attention kernels on one call of any shape, with random values.", EXAMPLES
    )
    command.group("the call", *SHAPE, "--causal", *VALUES)
    how = ("--kernels", *TIMING, "--baseline-kernel", "--device", "--env", WAITING)
    command.group("how to measure, and where", *how)
    shown = ("--metric", "--json", "--report", "--check")
    command.add_common(command.group("what to show and write", *shown))
    return command


def run(arguments: argparse.Namespace) -> int:
    """Replay, print and write rows; return 1 if `--check` fails."""
    return show(arguments, chosen(RandomCall, arguments))
