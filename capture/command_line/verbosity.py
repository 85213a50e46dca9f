"""`--quiet` and `--verbose` of both commands. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Iterator

from capture.text.printable import printable

NARRATORS = ("capture", "replay")
"""The loggers of our packages."""


def add_verbosity(parser: argparse._ActionsContainer) -> None:
    """Add the two options, which exclude each other."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="no progress and no hints; results, warnings and errors remain",
    )
    either.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say what happens and where the time goes",
    )


@contextlib.contextmanager
def narrated(verbose: bool) -> Iterator[None]:
    """Print what our packages log on stderr, if wanted, each line with the seconds since now."""
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
    """Prints to what `sys.stderr` is at that moment, so that progress bars stay whole."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start

    def emit(self, record: logging.LogRecord) -> None:
        seconds = time.monotonic() - self._start
        print(f"{seconds:7.1f} s  {printable(record.getMessage())}", file=sys.stderr)
