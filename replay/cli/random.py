"""`replay random`: runs kernels on calls of any shape, with random values."""

from __future__ import annotations

import argparse

from replay.api.call_choices import RandomCalls
from replay.cli.replayed import show
from replay.cli.requests import chosen
from replay.cli.shared_options import SHAPE, TIMING, VALUES, WAITING, VerbParser

EXAMPLES = """\
  replay random -b 2 -hq 24 -sq 4250 -d 64
  replay random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128            one decoded token, grouped heads
  replay random -sq 512,1024,2048 -d 64,128                   from which length on is what faster?
  replay random -sq 4096 --distribution sink --mask padding
"""


def parser() -> VerbParser:
    """Build the parser of `replay random`."""
    command = VerbParser(
        "random",
        "Run attention kernels on calls of any shape, with random values. Lists of sizes make\n"
        "a sweep: one call for each combination.",
        EXAMPLES,
    )
    command.group("the calls", *SHAPE, "--causal", *VALUES)
    how = ("--kernels", "--backward", *TIMING, "--baseline-kernel", "--device", "--env", WAITING)
    command.group("how to measure, and where", *how)
    shown = ("--metric", "--json", "--report", "--check")
    command.add_common(command.group("what to show and write", *shown))
    return command


def run(arguments: argparse.Namespace) -> int:
    """Replay, print and write rows; return 1 if `--check` fails."""
    return show(arguments, chosen(RandomCalls, arguments))
