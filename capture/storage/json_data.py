"""Reads JSON from untrusted sources, and checks it field by field."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_SHORTEST = 16
"""Minimum average bytes of text per list or object, because an empty list takes twenty times as
much memory as its text. A manifest has about 80 bytes."""
_FEW = 1 << 20
"""Number of lists and objects that any JSON text may contain."""


def parsed(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if its size in memory is excessive."""
    lists, objects = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if text.count(lists) + text.count(objects) > max(_FEW, len(text) // _SHORTEST):  # type: ignore[arg-type]
        raise ValueError("more lists and objects than its length accounts for")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def with_names(data: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an object with some of its fields renamed, in the same order."""
    return {names.get(name, name): value for name, value in data.items()}


def fields_of(kind: type, data: Any, *, ignore_unknown: bool = False) -> dict[str, Any]:
    """Return `data` as keyword arguments of a dataclass, after checking their types.

    Supported types are str, bool, int, float, None, `list[T]`, `dict[str, T]` and, for plain JSON,
    `dict[str, Any]`. A missing field keeps its default.
    """
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object for {kind.__name__}, got {shown(data)}")
    hints = _hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    if unknown := sorted(data.keys() - known.keys()):
        if not ignore_unknown:
            raise ValueError(f"unknown field {shown(unknown[0])}")
        data = {name: value for name, value in data.items() if name in known}
    for name, item in known.items():
        has_default = not (item.default is item.default_factory is dataclasses.MISSING)
        if name not in data and not has_default:
            raise ValueError(f"{name} is missing")
    return {name: typed(hints[name], value, name) for name, value in data.items()}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def typed(hint: Any, value: Any, name: str) -> Any:
    """Return a value after checking that it has the type `hint`."""
    if not _fits(hint, value):
        raise ValueError(f"{name} is {shown(value)}")
    return value


def required(data: Any, name: str, hint: Any) -> Any:
    """Return a field of an object after checking its type."""
    if not isinstance(data, dict):
        raise ValueError(f"not an object: {shown(data)}")
    if name not in data:
        raise ValueError(f"{name} is missing")
    return typed(hint, data[name], name)


def _fits(hint: Any, value: Any) -> bool:
    if hint is Any:
        return True
    origin, arguments = _analysed(hint)
    if origin in (Union, UnionType):
        return any(_fits(option, value) for option in arguments)
    if origin in (dict, list):
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(arguments[-1], part) for part in parts)
    if hint is float and type(value) is float:
        return math.isfinite(value)
    if hint in (int, float) and type(value) is int:
        return -(2**63) <= value < 2**64
    return type(value) is hint


@functools.cache
def _analysed(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def shown(value: Any) -> str:
    """Format a value of any size for an error message."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    return repr(value if not isinstance(value, str) else value[:80])[:120]
