"""Reads TOML files that people write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capture.storage.plain_files import possible

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, whose integers have at most 64 bits, as TOML requires.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not TOML; the message gives the reason.
    """
    try:
        tables = tomllib.loads(possible(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if any(not -(2**63) <= number < 2**63 for number in _integers(tables)):
        raise ValueError("an integer has more than 64 bits")
    return tables


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _integers(part)
    elif isinstance(value, int):
        yield value
