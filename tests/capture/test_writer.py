"""Files appear whole, the manifest follows them, and a full disk is told."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

import capture.call_file
from capture import load
from capture.call import AttentionCall
from capture.call_file import PackedCall
from capture.capture_record import CaptureRecord
from capture.dataset import Dataset
from capture.errors import CaptureError
from capture.writer import Writer, slug

MakeCall = Callable[..., AttentionCall]
CENSUS: dict[str, Any] = {"signatures": [], "rows": []}


def writer(directory: Path, model: str = "model") -> Writer:
    return Writer(Dataset.open_or_new(directory), CaptureRecord(model, "random"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_dropped_call_s_file_goes(tmp_path: Path, make_call: MakeCall) -> None:
    to = writer(tmp_path)
    to.put(PackedCall.of(make_call(call_index=0)), (), CENSUS)
    to.put(PackedCall.of(make_call(call_index=1)), (), CENSUS)
    to.put(PackedCall.of(make_call(call_index=2)), (0, 1), CENSUS)
    to.close(CENSUS, complete=True)
    assert names(tmp_path) == ["manifest.json", "model-000002.safetensors"]
    data = load(tmp_path)
    assert [entry.origin.call_index for entry in data.entries] == [2]
    assert data.captures[0].complete


def test_the_manifest_on_disk_follows_every_file(
    tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the moment, the manifest names only files that stand whole."""
    seen: list[int] = []
    save = Dataset.save_manifest

    def save_and_look(dataset: Dataset) -> None:
        save(dataset)
        found = Dataset.open_or_new(tmp_path)
        for entry in found.entries:
            entry.check()
        seen.append(len(found))

    monkeypatch.setattr(Dataset, "save_manifest", save_and_look)
    to = writer(tmp_path)
    for index in range(4):
        drop = (index - 2,) if index >= 2 else ()
        to.put(PackedCall.of(make_call(call_index=index)), drop, CENSUS)
    to.close(CENSUS, complete=True)
    assert seen == [0, 1, 2, 2, 2, 2]


def test_the_earlier_capture_of_the_same_model_goes_with_the_first_call(
    tmp_path: Path, make_call: MakeCall
) -> None:
    for model, indices in (("other", [5]), ("model", [0, 1])):
        to = writer(tmp_path, model)
        for index in indices:
            call = make_call(model=model, call_index=index)
            to.put(PackedCall.of(call), (), CENSUS)
        to.close(CENSUS, complete=True)
    before = names(tmp_path)

    to = writer(tmp_path)
    to.close(CENSUS, complete=False)
    assert names(tmp_path) == before

    to = writer(tmp_path)
    to.put(PackedCall.of(make_call(call_index=7)), (), CENSUS)
    to.close(CENSUS, complete=True)
    assert names(tmp_path) == [
        "manifest.json",
        "model-000007.safetensors",
        "other-000005.safetensors",
    ]
    assert [entry.path.name for entry in load(tmp_path).entries] == [
        "other-000005.safetensors",
        "model-000007.safetensors",
    ]


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def wrapped_full_disk(*args: Any, **kwargs: Any) -> None:
    # What safetensors makes of it.
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def load_if_any(directory: Path) -> int:
    return len(Dataset.open_or_new(directory))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("failure", [full_disk, wrapped_full_disk])
def test_a_full_disk_is_told_with_the_next_call(
    tmp_path: Path,
    make_call: MakeCall,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[..., None],
) -> None:
    to = writer(tmp_path)
    to.put(PackedCall.of(make_call(call_index=0)), (), CENSUS)
    while not to._queue.empty() or not load_if_any(tmp_path):
        time.sleep(0.001)
    monkeypatch.setattr(capture.call_file, "write_safetensors", failure)

    def go_on() -> None:
        for index in range(1, 10):
            to.put(PackedCall.of(make_call(call_index=index)), (), CENSUS)

    with pytest.raises(CaptureError, match=r"could not write to .*No space left"):
        go_on()
    with pytest.raises(CaptureError, match="the calls written before remain readable"):
        to.close(CENSUS, complete=True)
    data = load(tmp_path)
    assert [entry.origin.call_index for entry in data.entries] == [0]
    data.entries[0].check()
    assert not data.captures[0].complete


def test_a_manifest_that_cannot_be_written_at_the_end_is_told(
    tmp_path: Path, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = writer(tmp_path)
    to.put(PackedCall.of(make_call()), (), CENSUS)
    to._queue.put(None)
    to._thread.join()
    monkeypatch.setattr(Dataset, "save_manifest", full_disk)
    with pytest.raises(CaptureError, match="No space left"):
        to.close(CENSUS, complete=True)


@pytest.mark.timeout(20)
def test_an_earlier_file_that_cannot_be_deleted_is_told_and_nothing_hangs(
    tmp_path: Path, make_call: MakeCall
) -> None:
    to = writer(tmp_path)
    to.put(PackedCall.of(make_call()), (), CENSUS)
    to.close(CENSUS, complete=True)
    path = tmp_path / "model-000000.safetensors"
    path.unlink()
    path.mkdir()
    to = writer(tmp_path)

    def go_on() -> None:
        for index in range(1, 10):
            to.put(PackedCall.of(make_call(call_index=index)), (), CENSUS)

    with pytest.raises(CaptureError, match="could not write"):
        go_on()
    with pytest.raises(CaptureError, match="could not write"):
        to.close(CENSUS, complete=True)


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
