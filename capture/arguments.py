"""Argument parsing shared by both commands. Does not import torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any, NoReturn

from attention_replay import __version__

DTYPES = ("float32", "bfloat16", "float16")
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class OneSentenceParser(argparse.ArgumentParser):
    """Reports invalid arguments in one sentence instead of the full usage, and exits 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def add_dtype(self, group: Any, **options: Any) -> None:
        """Add `--dtype float32|bfloat16|float16`, or short: `--dtype bf16`."""
        group.add_argument(
            "--dtype",
            type=lambda text: _SHORT_DTYPES.get(text, text),
            choices=DTYPES,
            metavar="DTYPE",
            help="float32, bfloat16 or float16 (or short: fp32, bf16, fp16)",
            **options,
        )

    def add_version(self) -> None:
        """Add `--version`: our version, and those of torch, Triton and Python."""
        self.add_argument("--version", action=_Version, help="show versions and exit")


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Read from package metadata: importing torch takes seconds.
        others = " · ".join(f"{package} {_version(package)}" for package in ("torch", "triton"))
        python = platform.python_version()
        print(f"attention-replay {__version__} · {others} · Python {python}")
        parser.exit()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def positive(text: str) -> int:
    """Parse an integer of at least 1, for `add_argument(type=…)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text}")
    return int(text)


def natural(text: str) -> int:
    """Parse an integer of at least 0, for `add_argument(type=…)`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, not {text}")
    return int(text)
