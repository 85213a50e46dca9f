"""`replay selftest`: whether this machine measures right."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.api.chosen_device import check_name, device_of
from replay.cli import shared_options as options
from replay.cli.files import check_place, opened
from replay.cli.replayed import console_of
from replay.cli.stdout import reserved_stdout

if TYPE_CHECKING:
    import torch

    from replay.selftest.all_checks import SelftestReport

logger = logging.getLogger(__name__)

EXAMPLES = """\
  replay selftest
  replay selftest --device cpu --json selftest.json
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay selftest`."""
    command = options.verb(
        "selftest",
        "Measure things with known answers: does this machine measure right? Exits with 1\nif not.",
        EXAMPLES,
    )
    command.add_argument("--device", metavar="NAME", help="cuda, cpu … (default: a GPU if present)")
    options.add_json(command, resume=False)
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Make all checks, and print what they found; return 1 if one fails.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    check_place(arguments.json)
    check_name(arguments.device)
    device = device_of(arguments.device)
    from replay.report.selftest_table import print_selftest
    from replay.rows.row_files import plain

    with reserved_stdout():
        verdict = run_selftest(device, quiet=arguments.quiet)
    try:
        with opened(arguments.json) as file:
            if file is not None:
                json.dump(plain(verdict.to_json()), file, indent=1)
                file.write("\n")
    finally:  # the table is shown even if the file cannot be written
        print_selftest(verdict, console_of(arguments))
    return 0 if verdict.passed else 1


def run_selftest(device: torch.device, *, quiet: bool) -> SelftestReport:
    """Make all checks, with progress on stderr unless `quiet`."""
    from rich.console import Console
    from rich.text import Text

    from replay.selftest.all_checks import selftest

    with Console(stderr=True, quiet=quiet).status("") as status:

        def report(name: str) -> None:
            logger.info("%s", name)
            status.update(Text(name))

        return selftest(device, report)
