"""A recording counts the calls it saw, kept and lost, and always ends."""

import gc
import signal
import threading
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from capture import load, record
from capture.errors import RecordingWarning
from tests.capture.recording.callers import Caller, MakeLayers, assert_good, attend


@pytest.mark.parametrize("sample", ["spread", "first"])
def test_exactly_max_files_and_a_census_of_all(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path, sample: str
) -> None:
    model = make_layers(3)
    with record(model, tmp_path, max=5, sample=sample) as recording:
        for _ in range(7):
            model(states)
    assert (recording.seen, recording.kept) == (21, 5)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    data = load(tmp_path)
    assert_good(data)
    assert data.captures[0].calls_seen == 21
    rows = data.captures[0].census["rows"]
    assert [(row["module"], row["calls"], row["first_step"], row["last_step"]) for row in rows] == [
        (f"layers.{layer}", 7, 0, 6) for layer in range(3)
    ]
    if sample == "first":
        assert [call.origin.call_index for call in data] == list(range(5))
    else:
        assert Counter(call.origin.module for call in data).keys() == {
            "layers.0",
            "layers.1",
            "layers.2",
        }


def test_max_bytes_counts_what_is_stored(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with record(layers, tmp_path / "all", max=1) as recording:
        layers(states)
    one = recording.counts.nbytes
    assert one == 4 * 5 * 16 * 4
    with record(layers, tmp_path / "some", max_bytes=3 * one + 1) as recording:
        for _ in range(5):
            layers(states)
    assert recording.kept == len(load(tmp_path / "some")) == 3
    assert recording.counts.refused_for_bytes


@pytest.mark.parametrize("scale", ["nan", "inf", "-inf"])
def test_calls_with_a_nan_or_infinite_scale_are_not_stored(tmp_path: Path, scale: str) -> None:
    model = nn.ModuleDict({"normal": Caller(), "odd": Caller()})
    inputs = torch.randn(3, 1, 2, 5, 8)
    with warnings.catch_warnings(record=True), record(model, tmp_path) as recording:
        for _ in range(5):
            model["normal"](attend(*inputs))
            model["odd"](attend(*inputs, scale=float(scale)))  # each NaN is a new object
    assert recording.kept == 5
    assert recording.problems == [f"a call cannot be stored: scale {scale}"]
    census = load(tmp_path).captures[0].census
    assert [(row["module"], row["calls"], row["kept"]) for row in census["rows"]] == [
        ("normal", 5, 5),
        ("odd", 5, 0),
    ]
    of = {row["module"]: census["signatures"][row["signature"]] for row in census["rows"]}
    assert (of["normal"]["scale"], of["normal"]["refusal"]) == (None, "")
    assert (of["odd"]["scale"], of["odd"]["refusal"]) == (None, f"scale {scale}")


def test_two_threads_with_two_models(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    models = {"left": make_layers(2), "right": make_layers(2)}
    with record(models, tmp_path, max=6) as recording:
        threads = [
            threading.Thread(target=lambda model=model: [model(states) for _ in range(30)])
            for model in models.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (recording.seen, recording.kept) == (120, 6)
    data = load(tmp_path)
    assert len(data) == len(list(tmp_path.glob("*.safetensors"))) == 6
    assert_good(data)


def test_threads_that_go_on_after_the_recording_are_left_alone(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    model = make_layers(2)
    stop = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            while not stop.is_set():
                model(states)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    with record(model, tmp_path, max=50) as recording:
        thread.start()
        while recording.seen < 20:
            time.sleep(0.001)
    seen = recording.seen
    data = load(tmp_path)
    assert_good(data)
    for _ in range(20):
        model(states)
    stop.set()
    thread.join(100)
    assert not thread.is_alive()
    assert not failures
    assert recording.seen == seen
    assert_good(load(tmp_path))


def test_error_without_a_text_does_not_reach_the_model(tmp_path: Path) -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    class Rudely(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if "scaled_dot_product" not in str(func):
                raise Rude
            return super().__torch_function__(func, types, args, kwargs or {})

    plain = torch.randn(1, 2, 5, 8)
    rude = plain.as_subclass(Rudely)
    model = Caller()
    with pytest.warns(RecordingWarning, match="Rude$"), record(model, tmp_path) as recording:
        model(*(attend(each, each, each) for each in (plain, rude, plain)))
    assert recording.problems == ["an attention call could not be recorded: Rude"]
    assert len(load(tmp_path)) == recording.kept == 2


def test_recording_that_is_over_does_not_hold_the_model(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    model = make_layers()
    held = weakref.ref(model)
    with record(model, tmp_path) as recording:
        model(states)
    del model
    gc.collect()
    assert held() is None
    assert recording.summary == "kept of the eligible calls: 2 of 2"


@pytest.mark.parametrize(
    "interrupted",
    [
        "capture.hooks.census.Census.count_of",
        "capture.recording.copies.HostCopier.copy",
        "capture.recording.writer.Writer.close",
        "capture.storage.target.CaptureTarget.end",
    ],
)
def test_error_of_a_signal_handler_reaches_the_program(
    interrupted: str, layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    """A time limit set by a signal handler ends the program even while the recorder works."""

    def expire(*_: object) -> None:
        raise TimeoutError("the program's own limit")

    def run() -> None:
        with mock.patch(interrupted, interrupt), record(layers, tmp_path):
            layers(states)

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, expire)
    try:
        with pytest.raises(TimeoutError, match="the program's own limit"):
            run()
    finally:
        signal.signal(signal.SIGUSR1, before)
