"""Calls wait in memory while they may still be dropped, and are listed once they are complete."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture.call.attention_call import AttentionCall
from capture.recording.copies import stored_bytes
from capture.recording.counts import RecordingCounts
from capture.recording.writer import WaitingCall, Writer
from capture.storage import call_file
from capture.storage.header import CallHeader
from capture.storage.journal import Journal, read

MakeCall = Callable[..., AttentionCall]


class Wanted:
    """Writer with its failures, and methods that give it calls to write."""

    def __init__(self, directory: Path, make_call: MakeCall, **options: Any) -> None:
        self.failures: dict[int, Exception] = {}
        self.directory = directory
        self.journal = Journal.begin(directory / "model.journal", {"model": "m"}, replaces=False)
        settings = {"buffer_bytes": 1 << 30, "final": False, "durable": False}
        self.counts = RecordingCounts()
        self.writer = Writer(
            self.journal, self.counts, failed=self.failures.__setitem__, **{**settings, **options}
        )
        self.make_call = make_call

    def put(self, index: int, *drop: int) -> None:
        call = self.make_call(call_index=index)
        copy = self.writer.copied(call.tensors())
        self.writer.put(WaitingCall(replace(CallHeader.of(call), layouts=copy.layouts), copy), drop)

    def files(self) -> list[int]:
        return sorted(int(path.stem[-6:]) for path in self.directory.glob("*.safetensors"))

    def listed(self) -> list[int]:
        found = read(self.journal.path)
        assert found is not None
        return sorted(found.files)


@pytest.fixture
def wanted(tmp_path: Path, make_call: MakeCall) -> Iterator[Callable[..., Wanted]]:
    made: list[Wanted] = []

    def make(**options: Any) -> Wanted:
        made.append(Wanted(tmp_path, make_call, **options))
        return made[-1]

    yield make
    for each in made:
        each.writer.close()
        each.journal.close()


def test_call_dropped_from_memory_is_never_written(wanted: Callable[..., Wanted]) -> None:
    to = wanted()
    for index in range(20):
        to.put(index, *([index - 3] if index >= 3 else []))
    assert to.files() == []
    to.writer.close()
    assert to.files() == to.listed() == [17, 18, 19]
    assert to.counts.written_bytes == sum(map(os.path.getsize, map(to.writer.path, to.files())))


def test_durable_call_is_complete_when_put_returns(wanted: Callable[..., Wanted]) -> None:
    to = wanted(durable=True)
    for index in range(3):
        to.put(index, *([index - 1] if index else []))
        assert to.files() == to.listed() == [index]


def test_more_than_fits_in_memory_waits_for_the_disk(
    wanted: Callable[..., Wanted], make_call: MakeCall
) -> None:
    one = stored_bytes(make_call().tensors())
    to = wanted(buffer_bytes=2 * one)
    for index in range(10):
        to.put(index)
    assert to.counts.waited_seconds > 0
    assert len(to.listed()) >= 7
    to.writer.close()
    assert to.files() == to.listed() == list(range(10))


def test_written_file_of_a_dropped_call_is_deleted(
    wanted: Callable[..., Wanted], make_call: MakeCall
) -> None:
    to = wanted(buffer_bytes=1)
    to.put(0)
    to.put(1)  # waits until the first call is written
    to.put(2, 0)
    to.writer.close()
    assert to.files() == to.listed() == [1, 2]


def test_call_dropped_during_writing_is_deleted(
    wanted: Callable[..., Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_go_on = threading.Event(), threading.Event()
    original = call_file.write_safetensors

    def slow(*arguments: Any) -> str:
        writing.set()
        assert may_go_on.wait(60)
        return original(*arguments)

    monkeypatch.setattr(call_file, "write_safetensors", slow)
    to = wanted(final=True)
    to.put(0)
    assert writing.wait(60)
    to.put(1, 0)
    may_go_on.set()
    to.writer.close()
    assert to.files() == to.listed() == [1]


def test_call_that_cannot_be_written_is_the_only_call_lost(
    wanted: Callable[..., Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = call_file.write_safetensors

    def full_at_first(path: Path, *arguments: Any) -> str:
        if path.name.endswith("0.safetensors"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments)

    monkeypatch.setattr(call_file, "write_safetensors", full_at_first)
    to = wanted()
    for index in range(3):
        to.put(index)
    to.writer.close()
    assert list(to.failures) == [0]
    assert to.files() == to.listed() == [1, 2]
    found = read(to.journal.path)
    assert found is not None
    assert not found.sampled
