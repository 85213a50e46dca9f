"""Reads TOML files that people write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention_replay.errors import Error
from capture.storage.plain_files import possible

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_tables(path: Path, failure: type[Error]) -> dict[str, Any]:
    """Return the tables of a TOML file, whose integers have at most 64 bits, as TOML requires.

    Args:
        failure: class of the error that is raised if the file cannot be read or is not TOML.
    """
    try:
        tables = tomllib.loads(possible(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise failure(f"cannot read {path} ({error.strerror}): name a TOML file") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise failure(f"{path} is not TOML: {reason}") from error
    if any(not -(2**63) <= number < 2**63 for number in _integers(tables)):
        raise failure(f"{path} is not TOML: an integer has more than 64 bits")
    return tables


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _integers(part)
    elif isinstance(value, int):
        yield value
