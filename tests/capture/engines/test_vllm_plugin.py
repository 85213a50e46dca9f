"""Recording inside a vLLM server, with a stand-in: what begins and ends it, and its faults."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from capture import load
from capture.engines import vllm_plugin
from capture.errors import RecordingWarning
from capture.storage.repair import repair
from tests.capture.engines import engine_stand_in
from tests.capture.engines.engine_stand_in import LLM, Model, WorkerWrapperBase
from tests.capture.hooks.entry_points.vllm_stand_in import Builder, Impl

LENGTHS = [5, 40, 1, 30]
FUNCTIONS = (Impl.forward, Builder.build, WorkerWrapperBase.execute_model, Model.__call__)


def hooked() -> list[Any]:
    return [WorkerWrapperBase.execute_model, *(each.__code__ for each in FUNCTIONS)]


UNHOOKED = hooked()
TOKENS = LLM("a/llama").answer(LENGTHS)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LLM]]:
    """`serve("--max 4")` starts a server that records with these options."""
    recordings = []

    class Kept(vllm_plugin.WorkerRecording):
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            recordings.append(self)

    def start(options: str) -> LLM:
        monkeypatch.setenv("ATTENTION_REPLAY_RECORD", str(tmp_path / "calls"))
        monkeypatch.setenv("ATTENTION_REPLAY_OPTIONS", options)
        vllm_plugin.register()
        return LLM("a/llama")

    monkeypatch.setattr(vllm_plugin, "WorkerRecording", Kept)
    monkeypatch.setattr(WorkerWrapperBase, "execute_model", WorkerWrapperBase.execute_model)
    yield start
    for each in recordings:
        each.end()


def answer_until_unhooked(server: LLM) -> None:
    end = time.monotonic() + 60
    while hooked() != UNHOOKED:
        assert time.monotonic() < end
        assert server.answer(LENGTHS) == TOKENS


def test_server_without_the_variable_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTENTION_REPLAY_RECORD", raising=False)
    vllm_plugin.register()
    assert hooked() == UNHOOKED


def test_recording_ends_with_the_last_call_to_store(serve: Any, tmp_path: Path) -> None:
    answer_until_unhooked(serve("--max 4 --sample every:3"))
    dataset = load(tmp_path / "calls")
    assert [call.origin.call_index for call in dataset] == [0, 3, 6, 9]
    assert {call.origin.module for call in dataset} == {
        "model.layers.0.attn",
        "model.layers.1.attn",
    }
    (capture,) = dataset.captures
    assert (capture.model, capture.complete) == ("llama", True)


def test_ranks_and_engines_of_a_server_share_a_directory(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stand_in, "ranks", [2, 3])
    for engine, rank in itertools.product((0, 1), (2, 3)):
        monkeypatch.setattr(engine_stand_in.parallel, "data_parallel_index", engine)
        answer_until_unhooked(serve(f"--max 2 --sample first --rank {rank}"))
    joined = load(tmp_path / "calls").joined()
    assert [call.query.shape[1] for call in joined] == [8, 8, 8, 8]
    assert {call.origin.model for call in joined} == {"llama", "llama.engine1"}


no_space = Mock(side_effect=OSError(28, "No space left on device"))
broken = Mock(side_effect=ZeroDivisionError("broken"))
FAULTS = {
    "capture.recording.writer.Writer.put": (no_space, "No space left on device"),
    "capture.recording.kept_calls.KeptCalls.store": (broken, "could not be recorded: Zero"),
    "capture.recording.record.ModuleTracker": (broken, "goes on without a recording: Zero"),
    "capture.engines.vllm_plugin.WorkerRecording._is_done": (broken, "without a recording: Zero"),
}
"""Faults that end a recording, with its warning, by the function that fails."""


@pytest.mark.parametrize("place", FAULTS)
def test_fault_ends_the_recording_with_one_warning(
    place: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, warning = FAULTS[place]
    monkeypatch.setattr(place, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer_until_unhooked(serve("--max 4 --sample first"))
    (only,) = caught
    assert only.category is RecordingWarning
    assert warning in str(only.message)


@pytest.mark.parametrize("place", ["_pools", "phase_of"])
def test_recording_without_a_readable_call_ends(
    place: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"capture.hooks.entry_points.vllm.{place}", broken)
    monkeypatch.setattr(vllm_plugin, "MOST_UNKEPT", 20)
    with pytest.warns(RecordingWarning, match=r"none of \d+ attention calls can be stored"):
        answer_until_unhooked(serve("--max 4 --sample first"))


def test_end_of_the_server_ends_the_recording(serve: Any, tmp_path: Path) -> None:
    assert serve("--max 400 --sample first").answer(LENGTHS) == TOKENS
    util._run_finalizers(0)
    assert hooked()[1:] == UNHOOKED[1:]
    assert load(tmp_path / "calls").captures[0].complete


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--max x", "OPTIONS: argument --max: must be an integer of at least 1, not x$"),
        ("--name 'x", "OPTIONS: No closing quotation in"),
        ("--sample spread", "a server needs --sample first or every:N, not spread"),
        ("--max per-layer", "a server needs --max N, not per-layer"),
    ],
)
def test_invalid_options_are_a_warning(options: str, sentence: str, serve: Any) -> None:
    with pytest.warns(RecordingWarning, match=sentence):
        server = serve(options)
    assert hooked() == UNHOOKED
    assert server.answer(LENGTHS) == TOKENS


KILLED = """
import sys
from tests.capture.engines import engine_stand_in
sys.modules.update(engine_stand_in.MODULES)
from capture.engines.vllm_plugin import register
register()
server = engine_stand_in.LLM("a/llama")
while True:
    server.answer([5, 40, 1, 30])
    print("answered", flush=True)
"""


def test_recording_of_a_killed_server_can_be_repaired(
    start_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("ATTENTION_REPLAY_RECORD", str(calls))
    monkeypatch.setenv("ATTENTION_REPLAY_OPTIONS", "--max 100000 --sample first")
    server = start_python("-c", KILLED, cwd=tmp_path)
    for _ in range(3):
        assert server.stdout.readline() == "answered\n", server.stderr.read()
    server.kill()
    server.communicate()
    repair(calls)
    assert len(load(calls)) > 10
