"""Files of rows are replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.rows.files import RowsError, read_jsonl, save_jsonl
from tests.factories import row


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
