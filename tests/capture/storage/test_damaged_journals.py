"""Journals are damaged, truncated, exchanged or deleted, and captures are killed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture import load
from capture.call.attention_call import AttentionCall
from capture.errors import CaptureError
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.repair import repair
from capture.storage.target import CaptureTarget
from tests.capture.storage.captures import calls, ended, started

MakeCall = Callable[..., AttentionCall]


def with_a_zeroed_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines[4] = bytes(len(lines[4]) - 1) + b"\n"
    return b"".join(lines)


DAMAGES = {
    "cut to nothing": lambda content: b"",
    "the first line cut": lambda content: content[:30] + b"\n",
    "a line zeroed": with_a_zeroed_line,
    "the first line zeroed": lambda content: (
        bytes(content.index(b"\n")) + content[content.index(b"\n") :]
    ),
    "a bit flipped": lambda content: content.replace(b'"file"', b'"fila"', 1),
    "a choice not legible": lambda content: content.replace(b'{"sampled": 2}', b"{}"),
    "no text": lambda content: b"\xff" * len(content) + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("is_killed", [True, False])
def test_damaged_journal_costs_no_complete_call_and_is_reported(
    tmp_path: Path, damage: Callable[[bytes], bytes], is_killed: bool
) -> None:
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    target, journal = started(tmp_path, "model", range(5))
    journal.path.write_bytes(damage(journal.path.read_bytes()))
    if is_killed:
        journal.close()
        told = repair(tmp_path)
        assert all("only in memory" not in each for each in told)
    else:
        told = target.end(ended("model"))
        assert len(told) == 1
        assert "model.journal was damaged: " in told[0]
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1, 2, 3, 4]}
    assert all(entry.checksum for entry in load(tmp_path).entries)
    assert not journal.path.exists()
    assert load(tmp_path).captures[-1].complete is not is_killed


@pytest.mark.parametrize("at", [b"random", b"model", b'"bytes": ', b"checksum", b'"dropped": [1'])
@pytest.mark.parametrize("is_killed", [True, False])
def test_line_that_was_altered_is_not_believed(tmp_path: Path, at: bytes, is_killed: bool) -> None:
    target, journal = started(tmp_path, "model", range(3))
    (tmp_path / "model-000001.safetensors").unlink()
    journal.append(dropped=[1])
    content = journal.path.read_bytes()
    place = content.index(at) + len(at) - 1
    altered = bytes([content[place] ^ 1])  # often still valid: 2 becomes 3
    journal.path.write_bytes(content[:place] + altered + content[place + 1 :])
    if is_killed:
        journal.close()
        assert "was damaged" in " ".join(repair(tmp_path))
    else:
        assert "was damaged" in " ".join(target.end(ended("model")))
    assert calls(tmp_path) == {"model": [0, 2]}


def test_journal_that_is_cut_in_mid_run_is_still_of_a_capture_in_progress(tmp_path: Path) -> None:
    target, journal = started(tmp_path, "model", range(2))
    os.truncate(journal.path, 0)
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    assert repair(tmp_path) == []
    with pytest.raises(CaptureError, match="another capture of model is writing"):
        CaptureTarget.check(tmp_path, "model", overwrite=True).begin(
            CaptureRecord("model", "random")
        )
    target.end(ended("model"))
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1]}


def test_capture_that_ends_while_it_is_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = started(tmp_path, "model", range(2))
    listed = Dataset.listed.__func__

    def after_its_end(cls: type[Dataset], *arguments: Any) -> Dataset:
        monkeypatch.undo()
        assert target.end(ended("model")) == []
        return listed(cls, *arguments)

    monkeypatch.setattr(Dataset, "listed", classmethod(after_its_end))
    assert calls(tmp_path) == {"model": [0, 1]}
