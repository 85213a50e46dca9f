"""List of a row's fields, derived from the type `replay.rows.row.Row`.

This module imports no torch, because `--help` uses `METRICS`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from replay.rows.meaning import Column, Meaning
from replay.rows.row import Row

SCHEMA = 2
"""Version of the list of fields, stored in every row."""


class Field(NamedTuple):
    """Single value of a row, such as `speedup.ratio`."""

    path: str
    unit: str
    meaning: str


def _leaves(kind: type, path: str, around: Meaning) -> Iterator[Field]:
    for name, hint, meaning in _described(kind):
        text = around.text.replace("{}", meaning.text)
        unit = meaning.unit or around.unit
        inner = _nested(hint)
        if inner is None:
            yield Field(f"{path}{name}", unit, text)
        else:
            yield from _leaves(inner, f"{path}{name}.", Meaning(text, unit))


def _columns(kind: type, path: str = "") -> Iterator[tuple[str, Column]]:
    for name, hint, meaning in _described(kind):
        for column in meaning.columns:
            yield f"{path}{name}{'.' * bool(column.of)}{column.of}", column
        inner = _nested(hint)
        if inner is not None:
            yield from _columns(inner, f"{path}{name}.")


def _described(kind: type) -> Iterator[tuple[str, Any, Meaning]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            annotated, meaning, *_ = get_args(hint)
            yield name, annotated, Meaning(meaning) if isinstance(meaning, str) else meaning


def _nested(hint: Any) -> type | None:
    """Return the first type in a hint that has fields of its own; None without one."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if isinstance(option, type) and (is_dataclass(option) or hasattr(option, "_fields")):
            return option
    return None


FIELDS: list[Field] = [
    Field("schema", "", "version of this list of fields"),
    *_leaves(Row, "", Meaning("{}")),
]
"""Fields of a row, in the order of CSV columns. Only JSON also has the times of every round
(`….samples`, `….interrupted`), their doubt (`….unconfirmed`, `….control`, `….process_factor`), and
the errors by head and range (`accuracy.where.relative_l1`)."""

COLUMNS: dict[str, Column] = dict(
    sorted(_columns(Row), key=lambda item: item[1].over_calls == "counts")
)
"""Columns of tables by the dotted path of the field; verdicts come last."""

METRICS = (*dict.fromkeys(column.metric for column in COLUMNS.values()), "all")
"""Values that `--metric` accepts for columns."""


def leaf(row: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path in the tree of `row_to_json`; None if there is none."""
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
