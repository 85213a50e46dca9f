"""Options that are given more than once: a list grows, and anything else has one value.

Each action notes in `namespace.given`, by attribute, what was given: a default may be given too.
"""

from __future__ import annotations

import argparse
from typing import Any


class Once(argparse._StoreAction):
    """Stores the value, and refuses another one, of which argparse would keep the last."""

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
    """Stores names with commas between them, or numbers: those of every time it is given."""

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
    """Note flags and lists too, which differ from their defaults where they were given."""
    for name, value in vars(namespace).items():
        if value is True or (isinstance(value, list) and value):
            namespace.given.setdefault(name, value)
