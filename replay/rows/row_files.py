"""Files of rows: JSON Lines for reading and writing, CSV only for writing."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from attention_replay.errors import Error
from capture.storage.json_data import parsed, shown, typed, with_names
from capture.storage.plain_files import possible
from capture.text.printable import printable
from replay.rows.errors_of_output import Errors, GradientErrors, Where
from replay.rows.fields import FIELDS, SCHEMA, leaf
from replay.rows.replacement import replacing, why_not_written
from replay.rows.row import Row, Speedup, TimeSummary

T = TypeVar("T")

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that make a spreadsheet evaluate it."""

BEGINNING = '{"schema": '
"""Beginning of every line that `write_jsonl` writes."""


class RowsError(Error):
    """Reason why a file of rows cannot be used; the message gives the remedy."""


class NoRows(RowsError, FileNotFoundError):
    """Error for a file of rows that does not exist."""


class Writable(Protocol):
    """Object with the methods of a text file that writing rows needs."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...


class StoredRows(NamedTuple):
    """Complete rows of a file."""

    rows: list[Row]
    is_cut_off: bool
    """True if the file ends in the middle of another row."""


def row_to_json(row: Row) -> Any:
    """Return a row as a tree of plain JSON, in which NaN and infinity become null."""
    return plain({"schema": SCHEMA, **asdict(row)})


def row_from_json(data: dict[str, Any]) -> Row:
    """Return the row that `row_to_json` converted to this tree, with NaN in place of null.

    Raises:
        OtherSchema: the row has another version of the fields.
        ValueError, KeyError, TypeError, AttributeError: the data is not a row.
    """
    schema = data.get("schema", 1)
    if schema != SCHEMA and {"kernel", "call"} <= data.keys():
        raise OtherSchema(f"rows in format {shown(schema)}, but this version reads format {SCHEMA}")
    fields = {name: value for name, value in data.items() if name != "schema"}
    # Earlier versions wrote the entry point under another name.
    fields["call"] = with_names(fields["call"], {"road": "entry_point"})
    return rebuilt(Row, fields)


class OtherSchema(Exception):
    """Raised for a row whose fields have another version."""


def rebuilt(kind: type[T], data: dict[str, Any]) -> T:
    """Make a dataclass or named tuple from a tree made by `dataclasses.asdict`.

    Raises:
        KeyError: a field is unknown.
        ValueError, TypeError, AttributeError: a value does not have its field's type, or a figure
            is out of its range.
    """
    hints = _hints(cast("type", kind))
    made = kind(**{name: _value(hints[name], value, name) for name, value in data.items()})
    if isinstance(made, TimeSummary | Speedup | Errors | GradientErrors | Where):
        _check_figures(made)
    return made


def _check_figures(made: TimeSummary | Speedup | Errors | GradientErrors | Where) -> None:
    """Raise ValueError for a time, a speed-up or an error that no measurement has."""
    if isinstance(made, TimeSummary):
        is_possible = bool(made.samples) and min(made.p10, made.p50, *made.samples) > 0
    elif isinstance(made, Speedup):
        ends = (made.low, made.high)
        is_possible = all(end is None or end > 0 for end in (made.ratio, *ends))
        is_possible = is_possible and (made.low is None) == (made.high is None)
    else:
        errors = {name: value for name, value in vars(made).items() if "cosine" not in name}
        is_possible = not any(value < 0 for value in _numbers(tuple(errors.values())))
    if not is_possible:
        raise ValueError(f"a {type(made).__name__} has a figure out of its range")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any, name: str) -> Any:
    if hint is float:
        if value is None or type(value) is float:  # workers send non-finite values too
            return math.nan if value is None else value
        return float(typed(int, value, name))
    if hint in (str, int, bool):
        return typed(hint, value, name)
    kind, options = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _one_of(options, value, name)
    if kind is Literal and value not in options:
        raise ValueError(f"{name} is {shown(value)}")
    if kind is dict:
        parts = typed(dict[str, Any], value, name)
        return {key: _value(options[1], part, name) for key, part in parts.items()}
    if kind in (tuple, list):
        if not isinstance(value, tuple | list):
            raise ValueError(f"{name} is {shown(value)}")
        if kind is list or options[-1] is Ellipsis:
            return kind(_value(options[0], part, name) for part in value)
        return tuple(_value(*pair, name) for pair in zip(options, value, strict=True))
    names = getattr(hint, "_fields", None)
    if names is not None and not isinstance(value, dict):
        value = dict(zip(names, value, strict=True))
    return rebuilt(hint, value) if names or is_dataclass(hint) else value


def _one_of(options: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in options:
        return None
    *others, last = (option for option in options if option is not type(None))
    for option in others:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return _value(option, value, name)
    return _value(last, value, name)


def write_jsonl(rows: Iterable[Row], file: Writable) -> None:
    """Write one JSON object per line."""
    for row in rows:
        file.write(json.dumps(row_to_json(row)) + "\n")
        file.flush()


def save_jsonl(rows: Iterable[Row], path: Path) -> None:
    """Replace a file, in one step, with a file of these rows.

    Raises:
        RowsError: the file cannot be written.
    """
    try:
        with replacing(path) as file:
            write_jsonl(rows, file)
    except OSError as error:
        raise RowsError(f"cannot write {path}: {why_not_written(error)}") from error


def read_jsonl(path: Path) -> StoredRows:
    """Read a file that `write_jsonl` wrote.

    Raises:
        NoRows: the file does not exist.
        RowsError: the file cannot be read, or does not contain rows of this version.
    """
    try:
        # Avoid `splitlines`, which also splits at characters that JSON strings may contain.
        *lines, last = possible(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise NoRows(f"there is no file {path}: write one with `replay --json FILE`") from None
    except OSError as error:
        raise RowsError(
            f"cannot read {path}: {error.strerror}; name a file of `replay --json`"
        ) from error
    except UnicodeDecodeError as error:
        raise RowsError(f"{path} was not written by `replay --json`") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(row_from_json(parsed(line)))
        except OtherSchema as error:
            raise RowsError(
                f"{path} holds {error}: replay again, or read it with the version that wrote it"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RowsError(
                f"{path}, line {number}: not a row of `replay --json`, or one of another version: "
                "name another file"
            ) from error
    if not last.startswith(BEGINNING[: len(last)]):
        raise RowsError(f"{path}, line {len(lines) + 1}: not a row of `replay --json`")
    return StoredRows(rows, is_cut_off=bool(last))


def write_csv(rows: Iterable[Row], file: Writable) -> None:
    """Write rows as CSV with a column per field; join lists by spaces and quote formulas."""
    writer = csv.writer(file)
    writer.writerow(item.path for item in FIELDS)
    for row in rows:
        writer.writerow(_cells(row_to_json(row)))


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for item in FIELDS:
        value = leaf(row, item.path)
        if isinstance(value, list):
            value = " ".join(map(str, value))
        if isinstance(value, str):
            # Spreadsheets show text after an apostrophe instead of evaluating it.
            value = f"'{value}" if value.startswith(FORMULA_STARTS) else value
            value = "\n".join(map(printable, value.split("\n")))
        yield "" if value is None else str(value)


def plain(value: Any) -> Any:
    """Convert a tree for `json.dump`: named tuples become objects, non-finite numbers null."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
