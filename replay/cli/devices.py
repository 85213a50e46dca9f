"""`replay devices`: runs of the same calls on several types of device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from capture.command_line.parser import OneSentenceParser
from replay.api.compare_rows import run_of
from replay.cli.files import UsageError, check_place, opened, output_file
from replay.comparison.device_types import across_devices
from replay.report.device_tables import devices_markdown, print_devices

EXAMPLES = """examples:
  replay devices h100.jsonl h200.jsonl                  which kernel on which GPU?
  replay devices h100.jsonl h200.jsonl --markdown table.md
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of `replay devices`."""
    command = OneSentenceParser(
        prog="replay devices",
        description="Merge what `replay --json` wrote on several types of device: a table for\n"
        "each, and a matrix of kernels and devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("rows", nargs="+", metavar="ROWS", help="what `replay --json` wrote")
    command.add_argument(
        "--markdown", type=output_file, metavar="FILE", help="write the matrix (- for stdout)"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.add_version()
    return command


def run(argv: Sequence[str]) -> int:
    """Merge runs, and print and write the tables.

    Raises:
        UsageError: a file cannot be used.
        ComparisonError: the runs cannot be merged.
        RowsError: a file cannot be read.
    """
    arguments = parser().parse_args(argv)
    written = arguments.markdown
    if written not in (None, "-") and Path(written).resolve() in map(_resolved, arguments.rows):
        raise UsageError(f"--markdown would overwrite {written}: name another file")
    check_place(written)
    merged = across_devices([run_of(name) for name in arguments.rows])
    try:
        with opened(written) as file:
            if file is not None:
                file.write(devices_markdown(merged))
    finally:  # the tables are shown even if the file cannot be written
        print_devices(merged, Console(highlight=False, stderr=written == "-"))
    return 0


def _resolved(name: str) -> Path:
    return Path(name).resolve()
