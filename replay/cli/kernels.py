"""`replay kernels`: every kernel, and which can run here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.api.chosen_device import check_name, device_of
from replay.cli import shared_options as options
from replay.cli.requests import place_of

EXAMPLES = """\
  replay kernels
  replay kernels --env fa4=/opt/fa4/bin/python                which of them run there?
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay kernels`."""
    command = options.verb("kernels", "List all kernels, and which can run here.", EXAMPLES)
    options.add_place(command)
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Print every kernel, and which can run here.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    place = place_of(arguments)
    check_name(place.device)
    pythons = place.interpreters()
    from replay.workers.process import first_processes

    if place.in_process:
        return _list(arguments, None, pythons)
    with first_processes(place.timeout) as first:
        first.prepare(place.device)
        return _list(arguments, first, pythons)


def _list(arguments: argparse.Namespace, first: object, pythons: dict[str, str]) -> int:
    from typing import Any, cast

    device = device_of(arguments.device)

    from rich.console import Console

    from replay.kernels.registry import catalogue
    from replay.report.kernel_list import print_kernels
    from replay.workers.execution import execution

    kernels = list(catalogue().values())
    with execution(cast(Any, first), pythons, arguments.timeout) as where:
        found = where.probe([kernel for kernel in kernels if not kernel.variant_of], device)
    print_kernels(kernels, found, Console(highlight=False))
    return 0
