"""Which options a command asks for, and which it refuses: none may be silently ignored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, ClassVar


class Noted(argparse.Namespace):
    """Arguments that note which of them are read, in place of `argparse.Namespace`."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Noted.read.add(name)
        return super().__getattribute__(name)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those that set an attribute: not --help and --version."""
    found = [action for action in parser._actions if action.option_strings]
    return [action for action in found if action.dest not in ("help", "version", argparse.SUPPRESS)]


def values_of(action: argparse.Action) -> list[str]:
    """Two values that an option takes; fewer where there are fewer."""
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


def ignored(
    parser: argparse.ArgumentParser,
    read: set[str],
    mode: Sequence[str],
    misuse: Callable[[argparse.Namespace], str],
) -> list[str]:
    """The options that a run did not read, and that are not refused beside what chose its mode."""

    def is_taken(action: argparse.Action) -> bool:
        try:
            given = [*mode, action.option_strings[-1], *values_of(action)[:1]]
            return not misuse(parser.parse_args(given))
        except SystemExit:  # argparse's own refusal
            return False

    unread = [action for action in options(parser) if action.dest not in read]
    return [action.option_strings[-1] for action in unread if is_taken(action)]
