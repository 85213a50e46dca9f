"""Several captures are recorded into one directory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from capture import load, record
from capture.errors import CaptureError, RecordingWarning
from capture.recording.recording import Recording
from capture.storage.names import MANIFEST
from tests.capture.recording.callers import MakeLayers, assert_good
from tests.capture.storage.captures import ended, started


def run(model: Any, states: Tensor, out: Path, name: str, **options: Any) -> Recording:
    with record(model, out, name=name, **options) as recording:
        model(states)
    return recording


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_second_model_adds(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    run(layers, states, tmp_path, "zebra")
    first = contents(tmp_path)
    run(layers, states, tmp_path, "antelope")
    data = load(tmp_path)
    assert_good(data)
    assert [entry.origin.model for entry in data.entries] == ["zebra"] * 2 + ["antelope"] * 2
    assert [capture.model for capture in data.captures] == ["zebra", "antelope"]
    for name in first.keys() - {MANIFEST}:
        assert contents(tmp_path)[name] == first[name]


@pytest.mark.parametrize("name", ["zebra", "zebra!", "-zebra-"])
def test_same_model_is_refused(
    layers: nn.Module, states: Tensor, tmp_path: Path, name: str
) -> None:
    run(layers, states, tmp_path, "zebra")
    before = contents(tmp_path)
    remedy = "`overwrite=True`" if name == "zebra" else "rename this one"
    with pytest.raises(CaptureError, match=f"already contains a capture of zebra: .*{remedy}"):
        run(layers, states, tmp_path, name)
    assert contents(tmp_path) == before


def test_overwrite_replaces_only_that_model(
    layers: nn.Module, make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    run(layers, states, tmp_path, "antelope")
    before = contents(tmp_path)
    run(make_layers(1), states + 1, tmp_path, "zebra", overwrite=True)
    data = load(tmp_path)
    assert_good(data)
    assert Counter(entry.origin.model for entry in data.entries) == {"antelope": 2, "zebra": 1}
    assert sorted(contents(tmp_path)) == [
        "antelope-000000.safetensors",
        "antelope-000001.safetensors",
        MANIFEST,
        "zebra_2-000000.safetensors",
    ]
    assert contents(tmp_path)["zebra_2-000000.safetensors"] != before["zebra-000000.safetensors"]


def test_failing_run_that_records_nothing_deletes_nothing(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError), record(layers, tmp_path, name="zebra", overwrite=True):
        raise ZeroDivisionError
    with pytest.warns(RecordingWarning), record(layers, tmp_path, name="zebra", overwrite=True):
        pass
    assert contents(tmp_path) == before


def test_rebuilt_directory_takes_another_capture(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    (tmp_path / MANIFEST).unlink()
    run(layers, states, tmp_path, "antelope")
    data = load(tmp_path)
    assert data.note == ""
    assert len(data) == 4
    assert [bool(capture.census) for capture in data.captures] == [False, True]


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_directory_that_cannot_be_made_is_named(
    layers: nn.Module, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CaptureError, match=r"cannot write to .*; choose another with `out=`"),
        record(layers, tmp_path / "file" / below),
    ):
        pytest.fail("ran")


def test_two_captures_of_a_model_do_not_write_to_one_directory_at_once(
    layers: nn.Module, tmp_path: Path
) -> None:
    _, other = started(tmp_path, "Layers", range(0))
    with pytest.raises(CaptureError, match="another capture of Layers is writing"):  # noqa: SIM117
        with record(layers, out=tmp_path):
            pytest.fail("ran")
    other.close()


def test_captures_of_two_models_into_one_directory_at_once(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    """Neither of two captures reads a manifest that the other is about to replace."""
    with record(layers, tmp_path, name="zebra"):
        layers(states)
        other, _ = started(tmp_path, "antelope", range(1))
    assert "antelope is still being recorded" in load(tmp_path).note
    assert other.end(ended("antelope")) == []
    data = load(tmp_path)
    assert data.note == ""
    assert Counter(entry.origin.model for entry in data.entries) == {"antelope": 1, "zebra": 2}
