"""Files of rows are replaced whole or not at all."""

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from attention_replay.errors import Error
from replay.api.compare_rows import compare
from replay.report.comparison.comment import to_markdown
from replay.rows.row_files import (
    OtherSchema,
    RowsError,
    read_jsonl,
    row_from_json,
    row_to_json,
    save_jsonl,
)
from tests.factories import full_row


def test_unwritable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match=r"cannot write .*: No such file"):
        save_jsonl([], tmp_path / "nowhere" / "rows.jsonl")


def parts(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a tree of JSON values."""
    if at:
        yield at
    if isinstance(tree, dict | list):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from parts(part, (*at, name))


def test_invalid_value_is_refused_and_others_are_compared() -> None:
    data = row_to_json(full_row())
    assert row_to_json(row_from_json(data)) == data
    for path in parts(data):
        original = functools.reduce(getitem, path, data)
        values: list[Any] = ["text", True, 7, [[]], {"a": 1}, 10**400, -1.0, 5e-324, 1e308]
        for value in values:
            changed = copy.deepcopy(data)
            functools.reduce(getitem, path[:-1], changed)[path[-1]] = value
            is_number = isinstance(value, int | float) and isinstance(original, float)
            try:
                row = row_from_json(changed)
            except (OtherSchema, ValueError, KeyError, TypeError, AttributeError):
                continue
            assert value != 10**400
            assert type(value) is type(original) or is_number, (path, value)
            for before, after in ((full_row(), row), (row, full_row())):
                with contextlib.suppress(Error):
                    to_markdown([compare([before], [after])])


def test_entry_point_is_read_by_its_former_name() -> None:
    data = row_to_json(full_row())
    data["call"]["road"] = data["call"].pop("entry_point")
    assert row_from_json(data) == full_row()


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -1.0]])
def test_time_without_samples_is_refused(tmp_path: Path, samples: list[float]) -> None:
    data = row_to_json(full_row())
    data["time_ms"]["samples"] = samples
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(RowsError, match="line 1: not a row of `replay --json`"):
        read_jsonl(path)
