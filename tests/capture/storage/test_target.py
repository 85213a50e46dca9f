"""What a capture finds in its directory, and what it leaves there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture import load
from capture.call import AttentionCall
from capture.counted import counted
from capture.errors import CaptureError
from capture.storage import locks
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import MANIFEST, Dataset
from capture.storage.journal import Journal
from capture.storage.repair import repair
from capture.storage.target import Target, current_rank, rank_name, slug

MakeCall = Callable[..., AttentionCall]


@pytest.fixture
def started(make_call: MakeCall) -> Callable[..., tuple[Target, Journal]]:
    """`started(directory, model, indices)`: a capture with these calls, in progress."""

    def start(
        directory: Path, model: str, indices: range, *, overwrite: bool = False, began: str = ""
    ) -> tuple[Target, Journal]:
        target = Target.check(directory, model, overwrite=overwrite)
        journal = target.begin(CaptureRecord(model, "random", started=began))
        for index in indices:
            call = PackedCall.of(make_call(model=model, call_index=index))
            path = directory / f"{journal.stem}-{index:06d}.safetensors"
            journal.append(sampled=index)
            journal.append(**call.write(path).to_json())
        return target, journal

    return start


def ended(model: str, *, complete: bool = True) -> CaptureRecord:
    return CaptureRecord(model, "random", complete=complete)


def calls(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in load(directory).entries:
        entry.check()
        found.setdefault(entry.origin.model, []).append(entry.origin.call_index)
    return found


Started = Callable[..., tuple[Target, Journal]]


def test_an_earlier_capture_is_replaced_when_the_new_one_is_complete(
    tmp_path: Path, started: Started
) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    target, _ = started(tmp_path, "model", range(1, 3), overwrite=True)
    assert calls(tmp_path) == {"model": [0, 1, 2]}
    assert target.end(ended("model")) == []
    assert calls(tmp_path) == {"model": [1, 2]}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        MANIFEST,
        "model_2-000001.safetensors",
        "model_2-000002.safetensors",
    ]


def test_an_earlier_capture_stays_if_the_new_one_does_not_end(
    tmp_path: Path, started: Started
) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    target, _ = started(tmp_path, "model", range(7, 9), overwrite=True)
    [told] = target.end(ended("model", complete=False))
    assert "stays; of the new one, which is not complete, 2 calls went to" in told
    assert calls(tmp_path) == {"model": [0, 1, 2]}
    assert calls(tmp_path / "unfinished-model_2") == {"model": [7, 8]}


def test_a_killed_capture_is_read_told_and_finished(tmp_path: Path, started: Started) -> None:
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    _, journal = started(tmp_path, "model", range(3))
    journal.append(sampled=3)
    partial = tmp_path / "model-000003.safetensors"
    partial.write_bytes(bytes(100))
    with journal.path.open("ab") as file:
        file.write(b'{"file": "torn')
    journal.close()

    data = load(tmp_path)
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1, 2]}
    assert "the capture of model was killed: 3 complete calls, 1 more only" in data.note
    [told] = repair(tmp_path)
    assert told == "model: listed 3 calls of a killed capture; 1 more had been only in memory"
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1, 2]}
    assert load(tmp_path).note == ""
    assert not partial.exists()
    assert not journal.path.exists()
    assert repair(tmp_path) == []


def test_the_next_capture_finishes_a_killed_one(tmp_path: Path, started: Started) -> None:
    _, journal = started(tmp_path, "model", range(2))
    journal.close()
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    assert calls(tmp_path) == {"model": [0, 1], "zebra": [0]}
    assert load(tmp_path).note == ""
    with pytest.raises(CaptureError, match="already contains a capture of model"):
        Target.check(tmp_path, "model", overwrite=False)


@pytest.mark.parametrize(
    ("line", "boot", "kept"),
    [
        (None, None, [0, 1]),
        ({"dropped": [1]}, None, [0]),  # given up, and could not be deleted
        (None, "another", [0]),  # its values need not have reached the disk
    ],
)
def test_a_complete_file_without_a_line_is_kept_while_the_system_runs(
    tmp_path: Path,
    started: Started,
    make_call: MakeCall,
    monkeypatch: pytest.MonkeyPatch,
    line: dict[str, object] | None,
    boot: str | None,
    kept: list[int],
) -> None:
    monkeypatch.setattr("capture.storage.journal._boot", lambda: "this")
    _, journal = started(tmp_path, "model", range(1))
    unlisted, partial = (tmp_path / f"model-00000{index}.safetensors" for index in (1, 2))
    PackedCall.of(make_call(model="model", call_index=1)).write(unlisted)
    partial.write_bytes(bytes(1000))
    journal.append(**(line or {"sampled": 1}))
    journal.close()
    if boot is not None:
        monkeypatch.setattr("capture.storage.journal._boot", lambda: boot)
    lost = 1 if kept == [0] and line is None else 0
    assert calls(tmp_path) == {"model": kept}
    [told] = repair(tmp_path)
    assert told == (
        f"model: listed {counted(len(kept), 'call')} of a killed capture"
        + (f"; {lost} more had been only in memory" if lost else "")
    )
    assert calls(tmp_path) == {"model": kept}
    assert all(entry.checksum for entry in load(tmp_path).entries)
    assert unlisted.exists() == (1 in kept)
    assert not partial.exists()


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_a_zeroed_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines[4] = bytes(len(lines[4]) - 1) + b"\n"
    return b"".join(lines)


DAMAGES = {
    "cut": cut,
    "cut to nothing": lambda content: b"",
    "the first line cut": lambda content: content[:30],
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
def test_a_damaged_journal_costs_no_complete_call_and_is_told(
    tmp_path: Path, started: Started, damage: Callable[[bytes], bytes], is_killed: bool
) -> None:
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    target, journal = started(tmp_path, "model", range(5))
    journal.path.write_bytes(damage(journal.path.read_bytes()))
    if is_killed:
        journal.close()
        told = repair(tmp_path)
        assert all("only in memory" not in each for each in told)
    else:
        told = target.end(ended("model"), range(5))
        assert len(told) == 1
        assert "model.journal was damaged: " in told[0]
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1, 2, 3, 4]}
    assert all(entry.checksum for entry in load(tmp_path).entries)
    assert not journal.path.exists()
    assert load(tmp_path).captures[-1].complete is not is_killed


def copied_twice(tmp_path: Path, started: Started, *, complete: bool) -> tuple[Path, Path]:
    """A directory copied in mid-run and after the run, so that the copy has a journal still."""
    directory, copy = tmp_path / "data", tmp_path / "copy"
    target, journal = started(directory, "model", range(2), began="2026-01-01")
    shutil.copytree(directory, copy)
    started_again = [PackedCall.of(call) for call in load(directory)]
    for index, packed in enumerate(started_again, start=2):
        origin = replace(packed.header.origin, call_index=index)
        call = replace(packed, header=replace(packed.header, origin=origin))
        path = directory / f"model-{index:06d}.safetensors"
        journal.append(**call.write(path).to_json())
    target.end(CaptureRecord("model", "random", started="2026-01-01", complete=complete))
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    assert (copy / journal.path.name).exists()
    return directory, copy


@pytest.mark.parametrize("complete", [True, False])
def test_a_journal_of_an_earlier_copy_costs_no_call(
    tmp_path: Path, started: Started, complete: bool
) -> None:
    directory, copy = copied_twice(tmp_path, started, complete=complete)
    assert calls(copy) == calls(directory) == {"model": [0, 1, 2, 3]}
    if complete:
        assert load(copy).note == ""
    repair(copy)
    assert calls(copy) == {"model": [0, 1, 2, 3]}
    assert sorted(path.name for path in copy.iterdir()) == sorted(
        path.name for path in directory.iterdir()
    )


@pytest.mark.parametrize("model", ["model", "zebra"])
def test_a_journal_without_calls_costs_none(tmp_path: Path, started: Started, model: str) -> None:
    started(tmp_path, "model", range(2))[0].end(ended("model"))
    record = CaptureRecord(model, "random", started="2026-01-01").to_json()
    Journal.begin(tmp_path / "model.journal", record, replaces=False).close()
    assert calls(tmp_path) == {"model": [0, 1]}
    repair(tmp_path)
    assert calls(tmp_path) == {"model": [0, 1]}
    assert not (tmp_path / "model.journal").exists()


def test_a_journal_of_another_capture_costs_no_call(tmp_path: Path, started: Started) -> None:
    _, journal = started(tmp_path / "earlier", "model", range(2), began="2026-01-01")
    journal.close()
    directory = tmp_path / "data"
    started(directory, "model", range(5, 8), began="2026-01-02")[0].end(
        CaptureRecord("model", "random", started="2026-01-02", complete=True)
    )
    shutil.copytree(tmp_path / "earlier", directory, dirs_exist_ok=True)
    assert calls(directory) == {"model": [5, 6, 7]}
    repair(directory)
    assert calls(directory) == {"model": [5, 6, 7]}
    assert calls(directory / "unfinished-model") == {"model": [0, 1]}


def test_repair_deletes_nothing_that_the_manifest_lists(tmp_path: Path, started: Started) -> None:
    """Not even where a journal of another model claims the file, or its entry is damaged."""
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    manifest = tmp_path / MANIFEST
    data = json.loads(manifest.read_text())
    claimed = {**data["files"][1], "checksum": None}
    data["files"][2]["bytes"] = "?"
    manifest.write_text(json.dumps(data))
    files = sorted(tmp_path.glob("*.safetensors"))
    record = CaptureRecord("zebra", "random").to_json()
    journal = Journal.begin(tmp_path / "model.journal", record, replaces=False)
    journal.append(**claimed)
    journal.close()
    repair(tmp_path)
    assert sorted(tmp_path.glob("*.safetensors")) == files
    assert calls(tmp_path) == {"model": [0, 1, 2]}
    assert all(entry.checksum for entry in load(tmp_path).entries)


@pytest.mark.timeout(20)
def test_what_is_no_call_is_not_read_for_a_checksum(tmp_path: Path, started: Started) -> None:
    started(tmp_path, "model", range(2))[0].end(ended("model"))
    manifest, huge = tmp_path / MANIFEST, tmp_path / "model-000001.safetensors"
    data = json.loads(manifest.read_text())
    data["files"][1].update(bytes=1 << 40, checksum=None)
    data["files"][0]["checksum"] = None
    manifest.write_text(json.dumps(data))
    os.truncate(huge, 1 << 40)
    repair(tmp_path)
    assert [entry.checksum is None for entry in load(tmp_path).entries] == [False, True]


def test_a_manifest_that_is_gone_is_written_anew(tmp_path: Path, started: Started) -> None:
    started(tmp_path, "model", range(2))[0].end(ended("model"))
    (tmp_path / MANIFEST).unlink()
    assert "wrote" in repair(tmp_path)[0]
    data = load(tmp_path)
    assert data.note == ""
    assert all(entry.checksum for entry in data.entries)
    assert calls(tmp_path) == {"model": [0, 1]}


def test_models_whose_names_begin_alike_keep_their_files(tmp_path: Path, started: Started) -> None:
    for model in ("llama", "llama-3", "llama-3.2"):
        started(tmp_path, model, range(2))[0].end(ended(model))
    started(tmp_path, "llama", range(1), overwrite=True)[0].end(ended("llama"))
    assert calls(tmp_path) == {"llama": [0], "llama-3": [0, 1], "llama-3.2": [0, 1]}
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_a_capture_that_ends_leaves_those_in_progress_alone(
    tmp_path: Path, started: Started, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another writes a call each time that somebody looks at the directory."""
    slow, journal = started(tmp_path, "model.rank1", range(1))
    quick, _ = started(tmp_path, "model.rank0", range(2))
    written = [0]

    def meanwhile(look: Callable[..., Iterable[Path]]) -> Callable[..., Iterable[Path]]:
        def looked(directory: Path, *arguments: str) -> Iterable[Path]:
            written.append(len(written))
            path = directory / f"{journal.stem}-{written[-1]:06d}.safetensors"
            call = PackedCall.of(make_call(model="model.rank1", call_index=written[-1]))
            journal.append(sampled=written[-1])
            journal.append(**call.write(path).to_json())
            return look(directory, *arguments)

        return looked

    with monkeypatch.context() as patch:
        for name in ("glob", "iterdir"):
            patch.setattr(Path, name, meanwhile(getattr(Path, name)))
        assert quick.end(ended("model.rank0")) == []
    assert len(written) > 1
    assert slow.end(ended("model.rank1")) == []
    assert calls(tmp_path) == {"model.rank0": [0, 1], "model.rank1": written}


def test_a_capture_is_ended_by_itself_alone(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, journal = started(tmp_path, "model", range(2))

    @contextlib.contextmanager
    def after_another(directory: Path, seconds: float) -> Iterator[None]:
        assert repair(directory) == []
        assert journal.path.exists()
        with locks.locked(directory, seconds):
            yield

    monkeypatch.setattr("capture.storage.target.locked", after_another)
    assert target.end(ended("model")) == []
    assert calls(tmp_path) == {"model": [0, 1]}


def test_a_reader_holds_nobody_up(tmp_path: Path, started: Started) -> None:
    _, journal = started(tmp_path, "model", range(2))
    journal.close()
    with journal.path.open() as file:
        assert locks.try_lock(file.fileno(), shared=True)
        assert not locks.is_locked(journal.path)
        assert len(repair(tmp_path)) == 1
    assert calls(tmp_path) == {"model": [0, 1]}


def test_a_manifest_that_cannot_be_written_is_told_and_the_calls_stay(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = started(tmp_path, "model", range(2))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        [told] = target.end(ended("model"))
    assert re.search(r"could not write the manifest .*No space.*capture --repair", told)
    assert calls(tmp_path) == {"model": [0, 1]}
    repair(tmp_path)
    assert load(tmp_path).captures[0].complete


def test_a_journal_that_is_gone_costs_no_call_and_is_told(tmp_path: Path, started: Started) -> None:
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    target, journal = started(tmp_path, "gone", range(2))
    journal.path.unlink()
    [told] = target.end(ended("gone"), range(2))
    assert "gone.journal was damaged: 2 of 2 calls had to be read from the files" in told
    assert calls(tmp_path) == {"zebra": [0], "gone": [0, 1]}
    assert load(tmp_path).captures[-1].complete


def test_an_earlier_capture_is_replaced_whatever_the_journal_says(
    tmp_path: Path, started: Started
) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    target, journal = started(tmp_path, "model", range(5, 7), overwrite=True)
    journal.path.write_bytes(with_a_bit_flipped(journal.path.read_bytes(), b"replaces"))
    [told] = target.end(ended("model"), range(5, 7))
    assert "was damaged: 1 line of it cannot be read" in told
    assert calls(tmp_path) == {"model": [5, 6]}


def with_a_bit_flipped(content: bytes, at: bytes) -> bytes:
    place = content.index(at)
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("at", [b"random", b"model", b'"bytes": ', b"checksum", b'"dropped": [1'])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_line_that_was_altered_is_not_believed(
    tmp_path: Path, started: Started, at: bytes, is_killed: bool
) -> None:
    target, journal = started(tmp_path, "model", range(3))
    (tmp_path / "model-000001.safetensors").unlink()
    journal.append(dropped=[1])
    content = journal.path.read_bytes()
    place = content.index(at) + len(at) - 1
    altered = bytes([content[place] ^ 1])  # often a valid line still: 2 becomes 3
    journal.path.write_bytes(content[:place] + altered + content[place + 1 :])
    if is_killed:
        journal.close()
        assert "was damaged" in " ".join(repair(tmp_path))
    else:
        assert "was damaged" in " ".join(target.end(ended("model"), [0, 2]))
    assert calls(tmp_path) == {"model": [0, 2]}


def test_a_journal_that_is_cut_in_mid_run_is_still_of_a_capture_in_progress(
    tmp_path: Path, started: Started
) -> None:
    target, journal = started(tmp_path, "model", range(2))
    os.truncate(journal.path, 0)
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    assert repair(tmp_path) == []
    with pytest.raises(CaptureError, match="another capture of model is writing"):
        Target.check(tmp_path, "model", overwrite=True).begin(CaptureRecord("model", "random"))
    target.end(ended("model"), range(2))
    assert calls(tmp_path) == {"zebra": [0], "model": [0, 1]}


def test_a_journal_of_another_capture_names_no_file_of_this_one(
    tmp_path: Path, started: Started
) -> None:
    journals = [started(tmp_path, model, range(2))[1] for model in ("model", "zebra")]
    for each in journals:
        each.close()
    (tmp_path / "zebra.journal").write_bytes((tmp_path / "model.journal").read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    repair(tmp_path)
    assert sum(len(indices) for indices in calls(tmp_path).values()) >= 2
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4
    assert (tmp_path / "notes.txt").exists()


def test_what_a_killed_repair_has_moved_is_listed(
    tmp_path: Path, started: Started, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    _, journal = started(tmp_path, "model", range(7, 9), overwrite=True)
    PackedCall.of(make_call(model="model", call_index=9)).write(
        tmp_path / f"{journal.stem}-000009.safetensors"
    )
    journal.close()

    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "save_manifest", kill)
        with pytest.raises(Killed):
            repair(tmp_path)
    repair(tmp_path)
    assert calls(tmp_path / "unfinished-model_2") == {"model": [7, 8, 9]}
    assert calls(tmp_path) == {"model": [0, 1, 2]}


def test_a_capture_that_ends_while_it_is_read_is_found(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = started(tmp_path, "model", range(2))
    listed = Dataset.listed.__func__

    def after_its_end(cls: type[Dataset], *arguments: Any) -> Dataset:
        monkeypatch.undo()
        assert target.end(ended("model")) == []
        return listed(cls, *arguments)

    monkeypatch.setattr(Dataset, "listed", classmethod(after_its_end))
    assert calls(tmp_path) == {"model": [0, 1]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cogvideo-5b", "cogvideo-5b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("my_model.py:build", "my-model.py-build"),
        ("../../etc/passwd", "etc-passwd"),
        ("…", "model"),
        ("", "model"),
    ],
)
def test_a_name_becomes_the_beginning_of_a_file_name(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_long_names_become_short_and_stay_different() -> None:
    names = {slug("a" * 300), slug("a" * 301)}
    assert len(names) == 2
    assert max(map(len, names)) < 120


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [("0", "2", "model.rank0"), ("1", "2", "model.rank1"), ("0", "1", "model"), ("", "", "model")],
)
def test_a_rank_has_a_capture_of_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str, expected: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert rank_name("model", current_rank()) == expected
