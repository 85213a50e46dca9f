"""`replay history`: draws the speed of kernels over kept runs, as one HTML page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from replay.api.compare_rows import run_of
from replay.api.messages import say
from replay.cli.files import UsageError, check_files, opened, output_file
from replay.cli.shared_options import VerbParser
from replay.report.history import history_page

EXAMPLES = """\
  replay history baselines --out history.html           every .jsonl file of a directory
  replay history v1.jsonl v2.jsonl --out history.html
"""


def parser() -> VerbParser:
    """Build the parser of `replay history`."""
    command = VerbParser(
        "history",
        "Draw the speed of every kernel over runs that `replay --json` wrote, by commit and\n"
        "date, as one HTML page. Types of device are kept apart.",
        EXAMPLES,
    )
    command.add_argument(
        "rows", nargs="+", metavar="ROWS", help="files of rows, or directories of .jsonl files"
    )
    command.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        required=True,
        type=output_file,
        help="page to write (- for stdout)",
    )
    command.add_common()
    command.add_version()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Read runs and write the page.

    Raises:
        Error: a directory has no rows, or the page cannot be written.
        ComparisonError: a file holds no rows.
        RowsError: a file cannot be read.
    """
    arguments.rows = [file for name in arguments.rows for file in _files(name)]
    check_files(arguments)
    page = history_page([run_of(name) for name in arguments.rows])
    with opened(arguments.out) as file:
        assert file is not None
        file.write(page)
    if arguments.out != "-":
        say(f"wrote {arguments.out}")
    return 0


def _files(name: str) -> Iterator[str]:
    if not os.path.isdir(name):
        yield name
        return
    files = sorted(Path(name).glob("*.jsonl"))
    if not files:
        raise UsageError(f"{name} holds no .jsonl file: write one with `replay --json`")
    yield from map(str, files)
