"""Suites of synthetic calls: the published ones by name, and your own from a TOML file.

A file has a table `[[shapes]]` for each group of calls, whose values are numbers or lists of them:

    [[shapes]]
    q_heads = 32
    kv_heads = 8
    q_len = [512, 1024, 2048]
    head_dim = [64, 128]
    causal = [true, false]

A group has a call for each combination. Imports no torch.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from capture.storage.toml_data import read_tables
from replay.workloads.call_sizes import SUITES, ShapeError, Sizes, combinations

KEYS = tuple(inspect.signature(combinations).parameters)
"""Keys of a group."""


def sizes_of(suite: str, longest: int | None = None) -> list[Sizes]:
    """Return the shapes of a suite, without shapes longer than `longest`.

    Args:
        suite: name of a published suite, or path of a `.toml` file.

    Raises:
        ShapeError: no shape remains, or the file cannot be used.
    """
    shapes = read_suite(Path(suite)) if suite.endswith(".toml") else SUITES[suite][1]
    kept = [sizes for sizes in shapes if longest is None or sizes.longest <= longest]
    if not kept:
        shortest = min(sizes.longest for sizes in shapes)
        raise ShapeError(
            f"--max-seq {longest} excludes every shape of {suite}: the shortest is {shortest}"
        )
    return kept


def name_of(suite: str) -> str:
    """Return the name of a suite's calls, which is the stem of a file's name."""
    return Path(suite).stem if suite.endswith(".toml") else suite


def read_suite(path: Path) -> list[Sizes]:
    """Read the shapes of a file, without duplicates.

    Raises:
        ShapeError: the file cannot be read, or is not a suite.
    """
    tables = read_tables(path, ShapeError)
    _check_keys(path, "table", tables, ("shapes",))
    groups = tables.get("shapes")
    if not (groups and isinstance(groups, list) and all(isinstance(each, dict) for each in groups)):
        raise ShapeError(f"{path}: needs [[shapes]] with lines such as q_len = [512, 1024]")
    found: dict[Sizes, None] = {}
    for number, group in enumerate(groups, 1):
        _check_keys(path, "key", group, KEYS)
        values = {key: _listed(path, key, value) for key, value in group.items()}
        try:
            found.update(dict.fromkeys(combinations(**values)))
        except ShapeError as error:
            raise ShapeError(f"{path}, [[shapes]] number {number}: {error}") from error
    return list(found)


def _check_keys(path: Path, kind: str, given: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise ShapeError(f"{path}: unknown {kind} {name!r}, allowed: {', '.join(allowed)}")


def _listed(path: Path, key: str, value: Any) -> list[Any]:
    """Return the values of a key as a list, and check each."""
    values = value if isinstance(value, list) else [value]
    if key == "causal":
        name, is_usable = "true, false", all(type(each) is bool for each in values)
    else:
        name = "an integer of at least 1"
        is_usable = all(type(each) is int and each >= 1 for each in values)
    if not values or not is_usable:
        raise ShapeError(f"{path}: {key} must be {name}, or a list of these, not {value!r}")
    return values
