"""`replay selftest`: checks that this machine measures correctly."""

from __future__ import annotations

import argparse
import json
from functools import partial

from replay.api.chosen_device import device_of
from replay.api.run_selftest import selftest
from replay.cli.files import check_files, write_and_show
from replay.cli.shared_options import VerbParser
from replay.cli.stdout import reserved_stdout
from replay.rows.row_files import plain


def parser() -> VerbParser:
    """Build the parser of `replay selftest`."""
    command = VerbParser(
        "selftest",
        "Measure things whose results are known, and report how reliable this machine is.\n"
        "Exits with 1 if a check fails.",
    )
    command.add("--device")
    command.add("--json", help="write all checks as JSON (- for stdout)")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Run all checks, print and write the results; return 1 if a check fails."""
    check_files(arguments)
    device = device_of(arguments.device)

    from rich.console import Console

    from replay.report.selftest_table import print_selftest

    with reserved_stdout():
        verdict = selftest(device, progress=not arguments.quiet)
    console = Console(highlight=False, stderr=arguments.json == "-")
    write_and_show(
        arguments.json,
        lambda: json.dumps(plain(verdict.to_json()), indent=1) + "\n",
        partial(print_selftest, verdict, console),
    )
    return 0 if verdict.passed else 1
