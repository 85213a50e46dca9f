"""Options of a parser, values for them, and a namespace that notes which options are read."""

from __future__ import annotations

import argparse
from typing import Any, ClassVar


class Noted(argparse.Namespace):
    """An `argparse.Namespace` that notes which arguments are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Noted.read.add(name)
        return super().__getattribute__(name)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options that set an attribute: all but --help and --version."""
    found = [action for action in parser._actions if action.option_strings]
    return [action for action in found if action.dest not in ("help", "version", argparse.SUPPRESS)]


def values_of(action: argparse.Action) -> list[str]:
    """Return two values that an option takes, or fewer if it takes fewer."""
    if action.nargs == 0:
        return []
    if action.choices is not None:
        return [str(choice) for choice in action.choices][:2]
    parse: Any = action.type or str
    for pair in (["1", "2"], ["0.5", "0.25"], ["first", "hard"]):
        try:
            assert parse(pair[0]) != parse(pair[1])
        except (argparse.ArgumentTypeError, ValueError):
            continue
        return pair
    raise AssertionError(f"no value is known that {action.option_strings} takes")
