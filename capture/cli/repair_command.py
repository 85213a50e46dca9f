"""`capture repair DIR`: finish killed recordings."""

from __future__ import annotations

import argparse

from capture.cli.verbs import add_common_options, new_parser
from capture.command_line.parser import OneSentenceParser
from capture.large_imports import import_large
from capture.text.printable import printable

DESCRIPTION = """\
Recover recordings whose process was killed: list their complete calls, delete incomplete files, and
restore a missing or damaged manifest. On a file system without locks, first make sure that no
process is recording into DIR."""

EXAMPLES = "  capture repair captured_inputs"


def parser() -> OneSentenceParser:
    """Return the parser of `capture repair`."""
    usage = "capture repair DIR [options]"
    command = new_parser("repair", DESCRIPTION, examples=EXAMPLES, usage=usage)
    command.add_argument("dir", metavar="DIR", help="directory to repair")
    add_common_options(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Repair the directory and print what was done; return the exit code."""
    import_large("torch")
    from capture.storage.repair import repair

    nothing = "nothing to repair: every recording ended, and the manifest is whole"
    for sentence in repair(arguments.dir) or [nothing]:
        print(printable(sentence))
    return 0
