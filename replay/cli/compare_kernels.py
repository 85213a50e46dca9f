"""`replay --dir`, the default verb: runs every kernel on the calls of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.cli import shared_options as options
from replay.cli.files import output_file
from replay.cli.requests import recorded_calls, request_of
from replay.cli.showing import show

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
  replay --dir captured_inputs                                every kernel × every recorded call
  replay --dir captured_inputs --kernels 'torch-*,mine.py:attention' --json rows.jsonl
  replay --dir captured_inputs --metric all --report out.html
  replay random -b 2 -hq 24 -sq 4250 -d 64                    any shape, no recording needed
  replay plan --dir captured_inputs --out plan.json           a kernel for each layer
"""

VERBS = """\
other verbs, each with its own --help:
  random SHAPE · suite NAME     calls with random values, of any shape or a published list
  plan · verify                 choose a kernel for each layer · run the whole model with kernels
  compare · devices             runs against each other · kernels on several types of GPU
  doctor · reproduce            why a kernel is wrong · the smallest call on which it fails
  report · explain              an HTML page or charts of a run · why a model gains little
  kernels · selftest            which kernels can run here · whether this machine measures right
  watch · profile               replay whenever a file changes · one kernel under Nsight Compute
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay --dir`."""
    command = options.verb(
        "",
        "Run attention kernels on recorded calls: how fast, how accurate, which to use.",
        f"{EXAMPLES}\n{VERBS}",
        usage="replay --dir DIR [options]   or   replay VERB …",
    )
    what = command.add_argument_group("what to replay")
    options.add_recording(what)
    what.add_argument(
        "--versus-random",
        action="store_true",
        help="replay each call beside random values, and show how far those mislead",
    )
    options.add_kernels(what)
    how = command.add_argument_group("how to measure, and where")
    options.add_timing(how)
    options.add_limits(how)
    options.add_place(how, several=True)
    shown = command.add_argument_group("what to show and write")
    options.add_metric(shown)
    options.add_errors_against(shown)
    options.add_tolerances(shown)
    shown.add_argument("--per-call", action="store_true", help="a table per call, not per shape")
    options.add_json(shown)
    shown.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the rows as CSV (- for stdout)"
    )
    options.add_report(shown)
    options.add_saved_output(shown)
    options.add_check(shown)
    options.add_common(shown)
    command.add_version(shown)
    return command


def run(argv: Sequence[str]) -> int:
    """Replay, print and write; return 1 if a call cannot be read or `--check` fails.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    return show(arguments, parser(), lambda: request_of(arguments, recorded_calls(arguments)))
