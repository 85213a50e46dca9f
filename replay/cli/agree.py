"""`replay agree`: tests whether the output of a sequence depends on the batch or on chunks."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from capture.command_line.parser import positive
from replay.api.batch_invariance import CHUNK, agree
from replay.api.call_choices import RecordedCalls
from replay.api.chosen_device import check_name
from replay.api.messages import say
from replay.cli.files import INCONCLUSIVE, check_files, write_and_print
from replay.cli.shared_options import WAITING, VerbParser
from replay.cli.stdout import reserved_stdout

EXAMPLES = """\
  replay agree --dir captured_inputs --kernels 'torch-*'
  replay agree --dir captured_inputs --kernels mine.py:attention --chunk 256 --json verdicts.json
"""


def parser() -> VerbParser:
    """Build the parser of `replay agree`."""
    command = VerbParser(
        "agree",
        "Test kernels for batch invariance: whether each sequence of a recorded call has the\n"
        "same bits alone, in other company and in chunks of queries. Exits with 1 if bits\n"
        "differ or a kernel fails, and with 3 if no outputs could be compared.",
        EXAMPLES,
    )
    command.add("--dir", "--call", "--kernels")
    command.add_argument(
        "--chunk",
        type=positive,
        metavar="N",
        default=CHUNK,
        help=f"number of queries in a chunk (default {CHUNK})",
    )
    command.add("--device", WAITING)
    command.add("--json", help="write the verdicts as JSON (- for stdout)")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Compare outputs, and print and write the verdicts.

    Returns:
        1 if bits differ, a kernel fails or a call cannot be read, 3 if no outputs of a sequence
        were compared, 0 otherwise.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
    check_name(arguments.device)
    RecordedCalls(arguments.dir, arguments.call).check()
    with reserved_stdout():
        found = agree(
            arguments.dir,
            arguments.kernels,
            calls=arguments.call,
            chunk=arguments.chunk,
            device=arguments.device,
            workers=not arguments.in_process,
            timeout=arguments.timeout,
            progress=not arguments.quiet,
        )
    write_and_print(arguments.json, [asdict(each) for each in found.found], found)
    for sentence in filter(None, (found.note, *found.unreadable.values())):
        say(sentence)
    if found.differ or found.unreadable:
        return 1
    return 0 if found.is_decided else INCONCLUSIVE
