"""`replay devices`: compares runs of the same calls on several types of device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from capture.command_line.parser import OneSentenceParser
from replay.api.compare_rows import run_of
from replay.cli import shared_options as options
from replay.cli.files import UsageError, check_place, opened
from replay.comparison.device_types import across_devices
from replay.report.device_tables import devices_markdown, print_devices

EXAMPLES = """\
  replay devices h100.jsonl h200.jsonl                  which kernel on which GPU?
  replay devices h100.jsonl h200.jsonl --markdown table.md
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay devices`."""
    command = options.verb(
        "devices",
        "Merge what `replay --json` wrote on several types of device: a table for each,\n"
        "and a matrix of kernels and devices.",
        EXAMPLES,
    )
    command.add_argument("rows", nargs="+", metavar="ROWS", help="what `replay --json` wrote")
    options.add_markdown(command)
    options.add_common(command, verbosity=False)
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
    read = [Path(name).resolve() for name in arguments.rows]
    if written not in (None, "-") and Path(written).resolve() in read:
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
