"""A capture finds earlier captures in its directory, and leaves a readable dataset."""

import contextlib
import cProfile
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from capture import load
from capture.call.attention_call import AttentionCall
from capture.errors import CaptureError, DatasetError
from capture.storage import locks
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import MANIFEST
from capture.storage.journal import Journal
from capture.storage.repair import repair
from capture.storage.target import CaptureTarget, slug
from tests.capture.storage.captures import calls, ended, started
from tests.factories import random_call

MakeCall = Callable[..., AttentionCall]


def test_earlier_capture_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    target, _ = started(tmp_path, "model", range(1, 3), overwrite=True)
    assert calls(tmp_path) == {"model": [0, 1, 2]}
    assert target.end(CaptureRecord("model", "pretrained", complete=True)) == []
    assert calls(tmp_path) == {"model": [1, 2]}
    assert [capture.weights for capture in load(tmp_path).captures] == ["pretrained"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        MANIFEST,
        "model_2-000001.safetensors",
        "model_2-000002.safetensors",
    ]


def test_earlier_capture_stays_if_the_new_one_does_not_end(tmp_path: Path) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    target, _ = started(tmp_path, "model", range(7, 9), overwrite=True)
    [told] = target.end(ended("model", complete=False))
    assert "is kept; 2 calls of the new, incomplete capture went to" in told
    assert calls(tmp_path) == {"model": [0, 1, 2]}
    assert calls(tmp_path / "unfinished-model_2") == {"model": [7, 8]}


@pytest.mark.parametrize("moved", [[], [7], [7, 8]])
def test_repair_goes_on_after_a_repair_that_was_killed(tmp_path: Path, moved: list[int]) -> None:
    started(tmp_path, "model", range(3))[0].end(ended("model"))
    _, journal = started(tmp_path, "model", range(7, 9), overwrite=True)
    journal.close()
    aside = tmp_path / "unfinished-model_2"
    aside.mkdir()
    for name in (f"model_2-00000{index}.safetensors" for index in moved):
        (tmp_path / name).rename(aside / name)
    repair(tmp_path)
    assert calls(aside) == {"model": [7, 8]}
    assert calls(tmp_path) == {"model": [0, 1, 2]}


def test_killed_capture_is_read_reported_and_finished(tmp_path: Path) -> None:
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    _, journal = started(tmp_path, "model", range(3))
    journal.append(sampled=3)
    # Without a line, the values may not have reached the disk.
    unlisted = tmp_path / "model-000003.safetensors"
    PackedCall.of(random_call(origin={"model": "model", "call_index": 3})).write(unlisted)
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
    assert not unlisted.exists()
    assert not journal.path.exists()
    assert repair(tmp_path) == []


def test_next_capture_finishes_a_killed_one(tmp_path: Path) -> None:
    _, journal = started(tmp_path, "model", range(2))
    journal.close()
    started(tmp_path, "zebra", range(1))[0].end(ended("zebra"))
    assert calls(tmp_path) == {"model": [0, 1], "zebra": [0]}
    assert load(tmp_path).note == ""
    with pytest.raises(CaptureError, match="already contains a capture of model"):
        CaptureTarget.check(tmp_path, "model", overwrite=False)


@pytest.mark.parametrize("in_memory", [0, 2])
def test_directory_in_which_nothing_was_recorded_may_be_used_again(
    tmp_path: Path, in_memory: int
) -> None:
    _, journal = started(tmp_path, "model", range(0))
    for index in range(in_memory):
        journal.append(sampled=index)
    with pytest.raises(CaptureError, match="another capture of model is writing"):
        CaptureTarget.check(tmp_path, "model", overwrite=False)
    journal.close()
    with pytest.raises(DatasetError, match=r"model was killed: 0 complete calls.* repair"):
        load(tmp_path)
    started(tmp_path, "model", range(1, 3))[0].end(ended("model"))
    assert calls(tmp_path) == {"model": [1, 2]}
    assert load(tmp_path).note == ""
    assert repair(tmp_path) == []


def test_repair_deletes_journals_without_calls(tmp_path: Path) -> None:
    _, journal = started(tmp_path, "model", range(0))
    for index in range(2):
        journal.append(sampled=index)
    journal.close()
    (tmp_path / "other.journal").touch()
    assert repair(tmp_path) == [
        f"deleted {journal.path}: a killed capture of model had no complete call; 2 had been only "
        "in memory",
        f"deleted {tmp_path / 'other.journal'}: a capture was killed before its first call",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("complete", [True, False])
def test_journal_of_an_earlier_copy_costs_no_call(tmp_path: Path, complete: bool) -> None:
    """The directory was copied during the run, and the copy was updated after the run."""
    target, journal = started(tmp_path, "model", range(4), began="2026-01-01")
    during = journal.path.read_bytes().splitlines(keepends=True)[:5]  # the first two calls
    target.end(CaptureRecord("model", "random", started="2026-01-01", complete=complete))
    journal.path.write_bytes(b"".join(during))
    assert calls(tmp_path) == {"model": [0, 1, 2, 3]}
    assert bool(load(tmp_path).note) is not complete
    repair(tmp_path)
    assert calls(tmp_path) == {"model": [0, 1, 2, 3]}
    assert not journal.path.exists()


@pytest.mark.parametrize("model", ["model", "zebra"])
def test_journal_without_calls_costs_none(tmp_path: Path, model: str) -> None:
    started(tmp_path, "model", range(2))[0].end(ended("model"))
    record = CaptureRecord(model, "random", started="2026-01-01").to_json()
    Journal.begin(tmp_path / "model.journal", record, replaces=False).close()
    assert calls(tmp_path) == {"model": [0, 1]}
    repair(tmp_path)
    assert calls(tmp_path) == {"model": [0, 1]}
    assert not (tmp_path / "model.journal").exists()


def test_journal_of_another_capture_costs_no_call(tmp_path: Path) -> None:
    earlier, directory = tmp_path / "earlier", tmp_path / "data"
    started(earlier, "model", range(2), began="2026-01-01")[1].close()
    target, _ = started(directory, "model", range(5, 8), began="2026-01-02")
    target.end(CaptureRecord("model", "random", started="2026-01-02", complete=True))
    shutil.copytree(earlier, directory, dirs_exist_ok=True)
    assert calls(directory) == {"model": [5, 6, 7]}
    repair(directory)
    assert calls(directory) == {"model": [5, 6, 7]}
    assert calls(directory / "unfinished-model") == {"model": [0, 1]}


def test_repair_deletes_nothing_that_the_manifest_lists(tmp_path: Path) -> None:
    """Listed files stay, even if another journal claims the file or the file's entry is damaged."""
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


def test_models_whose_names_begin_alike_keep_their_files(tmp_path: Path) -> None:
    for model in ("llama", "llama-3", "llama-3.2"):
        started(tmp_path, model, range(2))[0].end(ended(model))
    started(tmp_path, "llama", range(1), overwrite=True)[0].end(ended("llama"))
    assert calls(tmp_path) == {"llama": [0], "llama-3": [0, 1], "llama-3.2": [0, 1]}
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_capture_that_ends_leaves_those_in_progress_alone(
    tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures in progress lose nothing, even if one writes a call whenever the directory is
    read."""
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
    assert "model.rank1 is still being recorded" in load(tmp_path).note
    assert slow.end(ended("model.rank1")) == []
    assert calls(tmp_path) == {"model.rank0": [0, 1], "model.rank1": written}


def test_work_grows_in_proportion_to_the_number_of_killed_captures(tmp_path: Path) -> None:
    calls_of: dict[int, list[int]] = {}
    for number in (1, 50, 200):  # the first run imports modules
        directory = tmp_path / str(number)
        directory.mkdir()
        for rank in range(number):
            model = f"model.rank{rank}"
            record = CaptureRecord(model, "random").to_json()
            journal = Journal.begin(directory / f"{model}.journal", record, replaces=False)
            call = PackedCall.of(random_call(origin={"model": model}))
            journal.append(**call.write(directory / f"{model}-000000.safetensors").to_json())
            journal.close()
        for work in (load, repair):
            profile = cProfile.Profile()
            profile.runcall(work, directory)
            count = sum(each.callcount for each in profile.getstats())
            calls_of.setdefault(number, []).append(count)
        assert len(load(directory)) == number
    for few, many in zip(calls_of[50], calls_of[200], strict=True):
        assert many < 4.3 * few


def test_capture_is_ended_by_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_capture_waits_until_another_has_written_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.0)
    with locks.locked(tmp_path), pytest.raises(CaptureError, match="another process keeps it"):
        started(tmp_path, "model", range(1))


def test_reader_delays_no_capture(tmp_path: Path) -> None:
    _, journal = started(tmp_path, "model", range(2))
    journal.close()
    with journal.path.open() as file:
        assert locks.try_lock(file.fileno(), shared=True)
        assert not locks.is_locked(journal.path)
        assert len(repair(tmp_path)) == 1
    assert calls(tmp_path) == {"model": [0, 1]}


def test_manifest_that_cannot_be_written_is_reported_and_the_calls_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = started(tmp_path, "model", range(2))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        [told] = target.end(ended("model"))
    assert re.search(r"could not write the manifest .*No space.*capture repair", told)
    assert calls(tmp_path) == {"model": [0, 1]}
    repair(tmp_path)
    assert load(tmp_path).captures[0].complete


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("my_model.py:build", "my-model.py-build"),
        ("../../etc/passwd", "etc-passwd"),
        ("…", "model"),
    ],
)
def test_name_becomes_the_beginning_of_a_file_name(name: str, expected: str) -> None:
    assert slug(name) == expected
    assert slug("a" * 300) != slug("a" * 301)
    assert len(slug("a" * 300)) < 120
