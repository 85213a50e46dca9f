"""`capture show DIR`: list the contents of a recording."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from capture.cli.verbs import add_common_options, new_parser
from capture.command_line.parser import OneSentenceParser
from capture.large_imports import import_large

if TYPE_CHECKING:
    from capture.storage.dataset import Dataset

DESCRIPTION = """\
List the calls of a recording: a directory, a .zip, .tar or .tar.gz of one, or an address such as
hf://datasets/ORG/NAME, s3://BUCKET/PATH or https://HOST/PATH."""

EXAMPLES = """\
  capture show captured_inputs           one line per call
  capture show captured_inputs --stats   why the calls may be difficult for quantised kernels"""


def parser() -> OneSentenceParser:
    """Return the parser of `capture show`."""
    usage = "capture show DIR [--stats] [options]"
    command = new_parser("show", DESCRIPTION, examples=EXAMPLES, usage=usage)
    command.add_argument("dir", metavar="DIR", help="recording to list")
    command.add_argument(
        "--stats",
        action="store_true",
        help="also show outlier channels of K and statistics of the weights, layer by layer",
    )
    add_common_options(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Print the recording's tables and return the exit code."""
    dataset = open_dataset(arguments.dir, quiet=arguments.quiet, whole=arguments.stats)
    from rich.console import Console

    from capture.cli.dataset_tables import show, show_statistics

    console = Console()
    show(dataset, console)
    if arguments.stats:
        show_statistics(dataset, console)
    return 0


def open_dataset(where: str, *, quiet: bool, whole: bool) -> Dataset:
    """Open a dataset; copy all files of a remote dataset if `whole`, else only its index."""
    from capture.storage.arrivals import shown_arrivals
    from capture.storage.locations import directory_of

    directory_of(where)  # reports a missing directory before torch is imported
    import_large("torch")
    from capture.storage.dataset import Dataset

    with shown_arrivals(quiet=quiet) as report:
        dataset = Dataset.open(where, report=report)
        if whole:
            dataset.fetch(report=report)  # a file that cannot be copied is reported when it is read
    return dataset
