"""Rows as JSON Lines and CSV, and back."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TextIO, TypeVar, get_args, get_origin, get_type_hints

from capture.call import Shape
from replay.rows.fields import FIELDS, leaf
from replay.rows.row import Row

T = TypeVar("T")


def row_to_json(row: Row) -> dict[str, Any]:
    """The row as a tree of plain JSON; NaN and infinities become null, `nan_count` tells them."""
    data = asdict(row)
    data["call"]["shape"] = row.call.shape._asdict()
    comparison = data.pop("comparison")
    data["speedup"] = comparison and {"vs": comparison["vs"], **comparison["speedup"]}
    plain: dict[str, Any] = _plain(data)
    return plain


def row_from_json(data: dict[str, Any]) -> Row:
    """The row that `row_to_json` was given, with NaN where it had to write null.

    Raises:
        KeyError: a field is missing, as in rows that an older version wrote.
    """
    data = dict(data)
    speedup = data.pop("speedup")
    if speedup is not None:
        speedup = dict(speedup)
        data["comparison"] = {"vs": speedup.pop("vs"), "speedup": speedup}
    else:
        data["comparison"] = None
    return rebuilt(Row, {each.name: data.pop(each.name) for each in fields(Row)} | data)


def rebuilt(kind: type[T], data: dict[str, Any]) -> T:
    """A dataclass (or named tuple) from the tree that `dataclasses.asdict` made of it."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    options = [option for option in get_args(hint) if option is not type(None)]
    if type(None) in get_args(hint):
        return None if value is None else _value(options[0], value)
    if hint is float:
        return math.nan if value is None else float(value)
    if get_origin(hint) is tuple:
        return tuple(value)
    if get_origin(hint) is list:
        return [_value(options[0], each) for each in value]
    if hint is Shape:
        return Shape(**value) if isinstance(value, dict) else Shape(*value)
    return rebuilt(hint, value) if isinstance(hint, type) and is_dataclass(hint) else value


def write_jsonl(rows: Iterable[Row], file: TextIO) -> None:
    """One JSON object a line."""
    for row in rows:
        file.write(json.dumps(row_to_json(row)) + "\n")
        file.flush()


def write_csv(rows: Iterable[Row], file: TextIO) -> None:
    """A column per field of `FIELDS`; lists joined with spaces."""
    writer = csv.writer(file)
    writer.writerow(item.path for item in FIELDS)
    for row in rows:
        writer.writerow(_cells(row_to_json(row)))


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for item in FIELDS:
        value = leaf(row, item.path)
        if isinstance(value, list):
            value = " ".join(map(str, value))
        yield "" if value is None else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
