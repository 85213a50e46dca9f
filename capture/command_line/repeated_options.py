"""Handles repeated options: lists are extended, and other options must have the same value.

Each action stores the given value in `namespace.given`, even if it equals the default.
"""

from __future__ import annotations

import argparse
from typing import Any


class Once(argparse._StoreAction):
    """Action that stores a value, and rejects a second, different value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if namespace.given.setdefault(self.dest, values) != values:
            raise argparse.ArgumentError(self, "is given twice, with two values: leave out one")
        super().__call__(parser, namespace, values, option_string)


class Listed(argparse._StoreAction):
    """Action that collects the comma-separated names, or the numbers, of all its uses."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = namespace.given.get(self.dest)
        if isinstance(values, str):
            values = values if before is None else f"{before},{values}"
        else:
            values = tuple(sorted({*values, *(before or ())}))
        namespace.given[self.dest] = values
        super().__call__(parser, namespace, values, option_string)


def note_flags(namespace: argparse.Namespace) -> None:
    """Store in `given` the flags and lists that differ from their defaults."""
    for name, value in vars(namespace).items():
        if value is True or (isinstance(value, list) and value):
            namespace.given.setdefault(name, value)
