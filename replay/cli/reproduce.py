"""`replay reproduce`: writes a minimal dataset and a script that show a kernel's failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from capture.text.printable import printable
from replay.api.choices import MeasureChoice, ReplayRequest, RunPlace
from replay.api.messages import say
from replay.api.reproduce_failure import SECONDS, reproduce
from replay.cli.files import UsageError
from replay.cli.requests import chosen, recorded_calls
from replay.cli.shared_options import VerbParser

if TYPE_CHECKING:
    from replay.reproduce.reproducer import Reproduced

EXAMPLES = """\
  replay reproduce --dir captured_inputs --call llama-000003 --kernel sage1 --out bug
"""


def parser() -> VerbParser:
    """Build the parser of `replay reproduce`."""
    command = VerbParser(
        "reproduce",
        "Write the smallest part of a recorded call that a kernel fails on, and a script\n"
        "that shows the failure with torch and the kernel's library alone. Exits with 1 if\n"
        "the kernel does not fail.",
        EXAMPLES,
    )
    command.add("--dir", "--call")
    command.add("--kernel", required=True)
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="new directory to write"
    )
    command.add("--device", "--env")
    command.add(
        "--max-seconds",
        default=SECONDS,
        help=f"time limit of the search for the smallest part (default {SECONDS:g})",
    )
    command.add("--timeout", "--tolerances")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Write the requested reproduction; return 1 if the kernel does not fail.

    Raises:
        Error: an argument cannot be used, or nothing could be written.
    """
    place = chosen(RunPlace, arguments)
    pythons = place.interpreters()
    if len(pythons) > 1:
        raise UsageError(f"--env names {len(pythons)} environments: name the kernel's own")
    measured = chosen(MeasureChoice, arguments)
    kernel = arguments.kernel
    ReplayRequest(recorded_calls(arguments), kernel, measured, place).check()
    found = reproduce(
        arguments.dir,
        arguments.call or "*",
        kernel,
        arguments.out,
        device=arguments.device,
        python=next(iter(pythons.values()), sys.executable),
        max_seconds=arguments.max_seconds,
        timeout=arguments.timeout,
        tolerances=measured.thresholds,
        progress=not arguments.quiet,
    )
    for line in _summary(found, arguments):
        print(printable(line))
    if found.smallest is not None and found.no_script:
        say(f"no reproduce.py: {found.no_script}")
    return 0 if found.smallest is not None else 1


def _summary(found: Reproduced, arguments: argparse.Namespace) -> list[str]:
    name, call, smallest = arguments.kernel, arguments.call or "the call", found.smallest
    if smallest is None:
        reason = f" ({found.whole.reason})" if found.whole.reason else ""
        return [
            f"{name} does not fail on {call}, it is {found.whole.status}{reason}: nothing written"
        ]
    part = smallest.call.origin.derived or f"all of {call}"
    limit = "" if smallest.is_complete else "; --max-seconds ended the search"
    return [
        f"{name}: {smallest.outcome.status}: {smallest.outcome.reason}",
        f"{arguments.out}: {part} ({smallest.call.shape}), after {smallest.trials} trials{limit}",
    ]
