"""Options of a parser, example values, and a namespace that notes which options are read."""

import argparse
from typing import Any, ClassVar


class Noted(argparse.Namespace):
    """An `argparse.Namespace` that notes which arguments are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Noted.read.add(name)
        return super().__getattribute__(name)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options that set an attribute, which are all except --help and --version."""
    found = [action for action in parser._actions if action.option_strings]
    return [action for action in found if action.dest not in ("help", "version", argparse.SUPPRESS)]
