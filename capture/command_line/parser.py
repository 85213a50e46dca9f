"""Argument parsing shared by both commands. Does not import torch."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import math
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from attention_replay import __version__
from attention_replay.errors import shortened
from capture.text.limits import must_be_integer
from capture.text.printable import printable

DTYPES = ("float32", "bfloat16", "float16")
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Help(argparse.RawDescriptionHelpFormatter):
    """Help text of at most 100 columns; texts with lines that begin with a space stay whole."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 100)
        super().__init__(prog, max_help_position=27, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n " in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, min(width, 85))  # longer lines of prose are hard to read


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that reports invalid arguments in one sentence without the usage, and exits with 2.

    An empty value, such as from an unset shell variable, is invalid unless the option has
    `type=str`, and so is a second value of an option that keeps only one. One-letter options cannot
    be combined, because argparse would read `-hkv 2` as `-h -k -v 2`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **options)
        self.register("type", None, not_empty)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        seen: set[argparse.Action] = set()
        for before, argument in zip(["", *options], options, strict=False):
            name = argument.partition("=")[0]
            looks_so = re.match("--?[a-zA-Z]", argument) and " " not in argument
            if not looks_so or self._awaits_value(before):
                continue
            action = self._action(name)
            if action is None:
                self.error(f"unknown option {name}{self._hint(name)}")
            if action in seen and type(action) is argparse._StoreAction:
                self.error(f"{' or '.join(action.option_strings)} is given twice: give it once")
            seen.add(action)
        return super().parse_known_args(given, namespace)

    def _hint(self, name: str) -> str:
        """Return what to say about an unknown option, after a colon; empty if nothing is close."""
        # The two dashes make any two options similar, and a letter or two are never very similar.
        cutoff = 0.75 if name.startswith("--") else 0.6
        near = difflib.get_close_matches(name, self._meant(), n=2, cutoff=cutoff)
        return f": did you mean {' or '.join(near)}?" if near else ""

    def _meant(self) -> list[str]:
        """Return the options to suggest for a misspelt option, without -h, -q and -v."""
        options = self._option_string_actions.items()
        return [name for name, action in options if len(name) > 2 or action.nargs != 0]

    def _awaits_value(self, given: str) -> bool:
        """Return whether the next argument is the value of this option."""
        action = self._option_string_actions.get(given)
        return action is not None and action.nargs is None

    def _action(self, name: str) -> argparse.Action | None:
        """Return the option of this name, or a one-letter option with a value, such as -b2."""
        options = self._option_string_actions
        if name in options:
            return options[name]
        action = options.get(name[:2])
        if action is None or action.nargs == 0:
            return None
        is_number = action.type in (positive, positives, natural)
        return action if not is_number or name[2].isdecimal() else None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(shortened(message))} (see {self.prog} --help)\n")

    def add_dtype(self, group: Any, **options: Any) -> None:
        """Add `--dtype float32|bfloat16|float16`, with short names such as `bf16`."""
        group.add_argument(
            "--dtype",
            type=lambda given: _SHORT_DTYPES.get(given, given),
            choices=DTYPES,
            metavar="DTYPE",
            help="float32, bfloat16 or float16 (or short: fp32, bf16, fp16)",
            **options,
        )

    def add_version(self, group: Any = None) -> None:
        """Add `--version`, which prints our version and those of torch, Triton and Python."""
        place = self if group is None else group
        others = " · ".join(f"{package} {_version(package)}" for package in ("torch", "triton"))
        versions = f"attention-replay {__version__} · {others} · Python {platform.python_version()}"
        place.add_argument(
            "--version", action="version", version=versions, help="show versions and exit"
        )


class Listed(argparse._StoreAction):
    """Action that collects comma-separated names or numbers over all uses of an option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not self.default:
            is_text = isinstance(values, str)
            values = f"{before},{values}" if is_text else tuple(sorted({*before, *values}))
        super().__call__(parser, namespace, values, option_string)


def _version(package: str) -> str:
    # Read from the package's metadata, because importing torch takes seconds.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


LARGEST = 2**63 - 1
"""Maximum integer value of an option; sizes and seeds in torch do not exceed this limit."""


def not_empty(given: str) -> str:
    """Check that a string is not empty, and return it, for `add_argument(type=…)`."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty: leave it out, or give a value")
    return given


def positive(given: str) -> int:
    """Parse an integer of at least 1, for `add_argument(type=…)`."""
    return _integer(given, 1)


def positives(given: str) -> tuple[int, ...]:
    """Parse comma-separated integers of at least 1, for `add_argument(type=…)`.

    The order is kept, and a number that occurs twice is used once.
    """
    not_empty(given)
    parts = [part.strip() for part in given.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError("has an empty entry: give numbers such as 512,1024")
    return tuple(dict.fromkeys(map(positive, parts)))


def natural(given: str) -> int:
    """Parse an integer of at least 0, for `add_argument(type=…)`."""
    return _integer(given, 0)


def _integer(given: str, least: int) -> int:
    not_empty(given)
    # The length is checked first, because Python does not convert thousands of digits.
    if given.isdecimal() and (len(given) > len(str(LARGEST)) or int(given) > LARGEST):
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST}, not {given}")
    if not given.isdecimal() or int(given) < least:
        raise argparse.ArgumentTypeError(must_be_integer(least, given))
    return int(given)


def positive_number(given: str) -> float:
    """Parse a number greater than 0, e.g. a time limit, for `add_argument(type=…)`."""
    value = _number(given)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a finite number greater than 0, not {given}")
    return value


def share(given: str) -> float:
    """Parse a number greater than 0 and at most 1, for `add_argument(type=…)`."""
    value = _number(given)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a number greater than 0 and at most 1, not {given}"
        )
    return value


def size(text: str) -> int:
    """Parse a size in bytes such as 500M or 20G, for `add_argument(type=…)`."""
    not_empty(text)
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, unit = text.upper().removesuffix("B"), 1
    if number[-1:] in units:
        number, unit = number[:-1], units[number[-1]]
    try:
        value = int(float(number) * unit)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"invalid size {text!r} (must be such as 500M or 20G)")
    return value


def _number(given: str) -> float:
    """Return a finite number; for any other string return NaN, which is outside every range."""
    not_empty(given)
    try:
        value = float(given)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
