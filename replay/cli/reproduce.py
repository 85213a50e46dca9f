"""`replay reproduce`: the smallest dataset, and a script, that show a kernel's failure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser, positive_number
from capture.command_line.verbosity import narrated
from capture.text.printable import printable
from replay.api.choices import RunPlace
from replay.api.reproduce_failure import SECONDS, reproduce
from replay.api.session import say_on_stderr
from replay.cli import shared_options as options
from replay.cli.files import UsageError

if TYPE_CHECKING:
    from replay.reproduce.reproducer import Reproduced

EXAMPLES = """\
  replay reproduce --dir captured_inputs --call llama-000007 --kernel sage1 --out bug
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay reproduce`."""
    command = options.verb(
        "reproduce",
        "Write the smallest part of a recorded call that a kernel fails on, and one\n"
        "Python file that shows it with torch and the kernel's library alone. Exits with\n"
        "1 if the kernel does not fail.",
        EXAMPLES,
    )
    options.add_directory(command)
    options.add_calls(command)
    options.add_kernel(command, required=True)
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a new directory to write"
    )
    options.add_device(command)
    options.add_environments(command)
    command.add_argument(
        "--max-seconds",
        type=positive_number,
        default=SECONDS,
        metavar="S",
        help=f"time limit for finding the smallest part (default {SECONDS:g})",
    )
    options.add_workers(command, in_process=False)
    options.add_tolerances(command)
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Write the requested reproduction; return 1 if the kernel does not fail.

    Raises:
        Error: an argument cannot be used, or nothing could be written.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    pythons = RunPlace(environments=tuple(arguments.env)).interpreters()
    if len(pythons) > 1:
        raise UsageError(f"--env names {len(pythons)} environments: name the kernel's own")
    found = reproduce(
        arguments.dir,
        arguments.call or "*",
        arguments.kernel,
        arguments.out,
        device=arguments.device,
        python=next(iter(pythons.values()), sys.executable),
        max_seconds=arguments.max_seconds,
        timeout=arguments.timeout,
        tolerances=arguments.tolerances,
        progress=not arguments.quiet,
    )
    for line in _summary(found, arguments):
        print(printable(line))
    if found.smallest is not None and found.no_script:
        say_on_stderr(f"no reproduce.py: {found.no_script}")
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
