"""`replay selftest`: checks that this machine measures correctly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.api.chosen_device import device_of
from replay.api.run_selftest import selftest
from replay.cli import shared_options as options
from replay.cli.files import check_place, opened
from replay.cli.stdout import reserved_stdout
from replay.rows.row_files import plain


def parser() -> OneSentenceParser:
    """Build the parser of `replay selftest`."""
    command = options.verb(
        "selftest",
        "Measure things whose answers are known, and say how far this machine can be\n"
        "relied on. Exits with 1 if it cannot.",
    )
    options.add_device(command)
    options.add_json(command, resume=False, what="all checks as JSON")
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Run all checks, print and write the results; return 1 if a check fails.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    check_place(arguments.json)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    device = device_of(arguments.device)

    from rich.console import Console

    from replay.report.selftest_table import print_selftest

    with reserved_stdout():
        verdict = selftest(device, progress=not arguments.quiet)
    try:
        with opened(arguments.json) as file:
            if file is not None:
                json.dump(plain(verdict.to_json()), file, indent=1)
                file.write("\n")
    finally:  # the table is shown even if the file cannot be written
        print_selftest(verdict, Console(highlight=False, stderr=arguments.json == "-"))
    return 0 if verdict.passed else 1
