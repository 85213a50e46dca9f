"""`capture check DIR`: verify a recording's files and recompute its outputs."""

from __future__ import annotations

import argparse
import sys

from capture.cli.show_command import open_dataset
from capture.cli.verbs import add_common_options, new_parser
from capture.command_line.parser import OneSentenceParser
from capture.text.counted import counted
from capture.text.printable import printable

DESCRIPTION = """\
Compare a recording's files with their checksums, and recompute each output with PyTorch's SDPA.
Exit code 1 if a file is damaged or an output differs. DIR may be anything that `capture show`
accepts."""

EXAMPLES = "  capture check captured_inputs"


def parser() -> OneSentenceParser:
    """Return the parser of `capture check`."""
    usage = "capture check DIR [options]"
    command = new_parser("check", DESCRIPTION, examples=EXAMPLES, usage=usage)
    command.add_argument("dir", metavar="DIR", help="recording to check")
    add_common_options(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Print one line per file and return the exit code."""
    dataset = open_dataset(arguments.dir, quiet=arguments.quiet, whole=True)
    from rich.console import Console

    from capture.cli.dataset_tables import show_file_checks
    from capture.cli.file_checks import check_files

    if dataset.note:
        print(f"note: {printable(dataset.note)}", file=sys.stderr)
    progress = Console(stderr=True, quiet=arguments.quiet)
    with progress.status("checking files and recomputing outputs …"):
        checks = check_files(dataset)
    show_file_checks(checks, Console())
    failed = sum(not check.good for check in checks)
    print(f"{len(checks) - failed:,} of {counted(len(checks), 'file')} passed")
    return 1 if failed or dataset.note else 0
