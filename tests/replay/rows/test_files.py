"""Files of rows are replaced whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from replay.rows.files import RowsError, read_jsonl, row_to_json, save_jsonl
from tests.factories import full_row, row


def test_saving_follows_links_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, link = tmp_path / "rows.jsonl", tmp_path / "link.jsonl"
    save_jsonl([row("a"), row("b")], path)
    link.symlink_to(path)
    save_jsonl([row("a")], link)
    assert link.is_symlink()
    assert [each.kernel for each in read_jsonl(path).rows] == ["a"]
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match=r"cannot write .*: No such file"):
        save_jsonl([], tmp_path / "nowhere" / "rows.jsonl")


def test_a_field_of_errors_has_as_many_ranges_for_each_head(tmp_path: Path) -> None:
    data = row_to_json(full_row())
    data["accuracy"]["where"]["relative_l1"] = [[0.1, 0.2], [0.3]]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(RowsError, match="line 1: not a row of `replay --json`"):
        read_jsonl(path)


def test_a_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # else to open it for writing would wait for a reader
    try:
        save_jsonl([row("a")], pipe)
        assert pipe.is_fifo()
        assert json.loads(os.read(reader, 1 << 16)) == row_to_json(row("a"))
    finally:
        os.close(reader)
