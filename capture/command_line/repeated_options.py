"""Options that are given more than once: lists grow, and other options must agree.

Each action notes the given value in `namespace.given`, also if it equals the default.
"""

from __future__ import annotations

import argparse
from typing import Any


class Once(argparse._StoreAction):
    """Stores the value, and refuses a second, different one."""

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
    """Collects the names (with commas between them) or numbers of every time it is given."""

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
    """Note flags and lists, which differ from their defaults if they were given."""
    for name, value in vars(namespace).items():
        if value is True or (isinstance(value, list) and value):
            namespace.given.setdefault(name, value)
