"""`replay --dir`, the default verb: runs kernels on the calls of a recording."""

from __future__ import annotations

import argparse

from replay.cli.replayed import show
from replay.cli.requests import recorded_calls
from replay.cli.shared_options import DEVICES, RECORDING, TIMING, WAITING, VerbParser

EXAMPLES = """\
  replay --dir captured_inputs                                default kernels × recorded calls
  replay --dir captured_inputs --kernels 'torch-*,mine.py:attention' --json rows.jsonl
  replay --dir captured_inputs --metric all --report out.html
  replay random -b 2 -hq 24 -sq 4250 -d 64                    any shape, no recording needed
  replay plan --dir captured_inputs --out plan.json           a kernel for each layer
"""

VERBS = """\
other verbs, each with its own --help:
  random SHAPE · suite NAME     calls with random values, of any shape or a published list
  tune · plan · verify · export a faster model in one step · a kernel per layer · run it · elsewhere
  compare · devices · history   runs against each other · types of GPU · runs over commits
  doctor · reproduce · agree    why a kernel is wrong · the smallest such call · batch invariance
  report · cache-formats        an HTML page or charts of a run · which layers bear an 8-bit cache
  explain · kernels · selftest  why a model gains little · which kernels run here · machine's check
  watch · profile · foretell    replay a changed file · under Nsight Compute · any plan's drift
"""


def parser() -> VerbParser:
    """Build the parser of `replay --dir`."""
    command = VerbParser(
        "",
        "Run attention kernels on recorded calls: how fast, how accurate, which to use.",
        f"{EXAMPLES}\n{VERBS}",
        usage="replay --dir DIR [options]   or   replay VERB …",
    )
    what = command.group("what to replay", *RECORDING)
    what.add_argument(
        "--versus-random",
        action="store_true",
        help="replay each call with random values too, and show how far those mislead",
    )
    command.add("--kernels", to=what)
    how = ("--backward", *TIMING, "--baseline-kernel", "--max-time", DEVICES, "--env", WAITING)
    command.group("how to measure, and where", *how)
    shown = command.group(
        "what to show and write", "--details", "--metric", "--errors-against", "--tolerances"
    )
    shown.add_argument("--per-call", action="store_true", help="a table per call, not per shape")
    command.add("--json", "--resume", "--report", "--check", to=shown)
    command.add_common(shown)
    command.add_version(shown)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Replay, print and write rows; return 1 if a call cannot be read or `--check` fails."""
    return show(arguments, recorded_calls(arguments))
