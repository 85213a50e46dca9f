"""`replay kernels`: lists all kernels, and where each can run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.api.choices import RunPlace
from replay.api.list_kernels import listing
from replay.cli import shared_options as options

EXAMPLES = """\
  replay kernels                                        all kernels
  replay kernels 'sage*,torch-*'                        some of them
  replay kernels --env fa4=/opt/fa4/bin/python          in another environment too
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay kernels`."""
    command = options.verb(
        "kernels", "List kernels, and say which of them can run on this machine.", EXAMPLES
    )
    command.add_argument(
        "pattern",
        nargs="?",
        metavar="A,'GLOB*'",
        help="names and globs of kernels (default: all)",
    )
    options.add_device(command)
    options.add_environments(command)
    options.add_workers(command)
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Print each kernel, and the environments in which it can run.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    place = RunPlace(
        device=arguments.device,
        environments=tuple(arguments.env),
        timeout=arguments.timeout,
        in_process=arguments.in_process,
    )
    found = listing(arguments.pattern, place)

    from rich.console import Console

    from replay.kernels.registry import catalogue
    from replay.report.kernel_list import print_kernels

    variants = [kernel for kernel in catalogue().values() if kernel.variant_of]
    print_kernels(found.kernels, variants, found.findings, Console(highlight=False))
    return 0
