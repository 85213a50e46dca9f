"""What the argument parsers of both commands share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneSentenceParser(argparse.ArgumentParser):
    """Answers wrong arguments with one sentence instead of the whole usage; exits 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """A whole number, at least 1, for `add_argument(type=…)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text}")
    return int(text)


def natural(text: str) -> int:
    """A whole number, 0 included, for `add_argument(type=…)`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text}")
    return int(text)
