"""Verbs of `capture`, and the options that all verbs share. Does not import torch."""

from __future__ import annotations

import re

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import add_verbosity

RECORD = "capture.cli.record_command"
"""Module of the default verb `record`."""

VERBS = {
    "show": "capture.cli.show_command",
    "check": "capture.cli.check_command",
    "repair": "capture.cli.repair_command",
    "share": "capture.cli.share_command",
}
"""Modules of the other verbs. Each verb's module has `parser()` and `run(arguments)`."""


def new_parser(verb: str, description: str, *, examples: str, usage: str) -> OneSentenceParser:
    """Return a parser that has no options yet, and whose help ends with examples."""
    return OneSentenceParser(
        prog=f"capture {verb}".strip(),
        usage=usage,
        description=description,
        epilog=f"examples:\n{examples}",
    )


def add_common_options(parser: OneSentenceParser) -> None:
    """Add the options that all verbs share, after the verb's own options."""
    add_verbosity(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_version()
    parser.set_defaults(left_behind="")


def with_flags(message: str) -> str:
    """Replace keyword arguments such as `max_bytes=` with flags such as --max-bytes."""
    return re.sub(r"`(\w+)=(?:True)?`", lambda found: "--" + found[1].replace("_", "-"), message)
