"""Options `--quiet` and `--verbose` of both commands. Does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Iterator

from capture.text.printable import printable

NARRATORS = ("capture", "replay")
"""Loggers of our packages."""


def add_verbosity(parser: argparse._ActionsContainer) -> None:
    """Add `--quiet` and `--verbose`, which exclude each other."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print only results, warnings and errors, no progress and no suggestions",
    )
    either.add_argument("-v", "--verbose", action="store_true", help="print each step and its time")


@contextlib.contextmanager
def narrated(verbose: bool) -> Iterator[None]:
    """Print our packages' log on stderr if `verbose`, each line with the seconds since entry."""
    loggers = [logging.getLogger(name) for name in NARRATORS] if verbose else []
    narrator = _Narrator(time.monotonic())
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(narrator)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(narrator)
            logger.setLevel(level)


class _Narrator(logging.Handler):
    """A handler that prints to the current `sys.stderr`, so that progress bars stay intact."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start

    def emit(self, record: logging.LogRecord) -> None:
        seconds = time.monotonic() - self._start
        print(f"{seconds:7.1f} s  {printable(record.getMessage())}", file=sys.stderr)
