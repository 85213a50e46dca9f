"""`replay devices`: compares runs of the same calls on several types of device."""

from __future__ import annotations

import argparse
from functools import partial

from rich.console import Console

from replay.api.compare_rows import run_of
from replay.cli.files import check_files, write_and_show
from replay.cli.shared_options import VerbParser
from replay.comparison.device_types import across_devices
from replay.report.device_tables import devices_markdown, print_devices

EXAMPLES = """\
  replay devices h100.jsonl h200.jsonl                  which kernel on which GPU?
  replay devices h100.jsonl h200.jsonl --markdown table.md
"""


def parser() -> VerbParser:
    """Build the parser of `replay devices`."""
    command = VerbParser(
        "devices",
        "Merge the files that `replay --json` wrote on several types of device: a table for\n"
        "each, and a matrix of kernels and devices.",
        EXAMPLES,
    )
    command.add_argument("rows", nargs="+", metavar="ROWS", help="files that `replay --json` wrote")
    command.add("--markdown")
    command.add_common()
    command.add_version()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Merge runs, then print and write their tables."""
    check_files(arguments)
    merged = across_devices([run_of(name) for name in arguments.rows])
    console = Console(highlight=False, stderr=arguments.markdown == "-")
    write_and_show(
        arguments.markdown,
        partial(devices_markdown, merged),
        partial(print_devices, merged, console),
    )
    return 0
