"""`replay kernels`: lists all kernels and the environments in which each can run."""

from __future__ import annotations

import argparse

from replay.api.choices import RunPlace
from replay.api.list_kernels import listing
from replay.cli.requests import chosen
from replay.cli.shared_options import WAITING, VerbParser

EXAMPLES = """\
  replay kernels                                        all kernels
  replay kernels 'sage*,torch-*'                        some of them
  replay kernels --env fa4=/opt/fa4/bin/python          in another environment too
"""


def parser() -> VerbParser:
    """Build the parser of `replay kernels`."""
    command = VerbParser(
        "kernels", "List kernels, and report which of them can run on this machine.", EXAMPLES
    )
    command.add_argument(
        "pattern",
        nargs="?",
        metavar="A,'GLOB*'",
        help="names and globs of kernels (default: all)",
    )
    command.add("--device", "--env", WAITING)
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Print each kernel, and the environments in which it can run."""
    kernels, findings = listing(arguments.pattern, chosen(RunPlace, arguments))

    from rich.console import Console

    from replay.kernels.registry import catalogue
    from replay.report.kernel_list import print_kernels

    variants = [kernel for kernel in catalogue().values() if kernel.variant_of]
    print_kernels(kernels, variants, findings, Console(highlight=False))
    return 0
