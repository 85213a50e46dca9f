"""Several captures are recorded into one directory."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from capture import load, record
from capture.errors import CaptureError, RecordingWarning
from capture.recording.recording import Recording
from capture.storage.names import MANIFEST
from tests.capture.recording.callers import assert_good


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


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [("0", "2", "model.rank0"), ("1", "2", "model.rank1"), ("0", "1", "model"), ("", "", "model")],
)
def test_rank_has_a_capture_of_its_own(
    rank: str,
    ranks: str,
    expected: str,
    layers: nn.Module,
    states: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    run(layers, states, tmp_path, "model")
    origins = {(call.origin.model, call.origin.rank) for call in load(tmp_path)}
    assert origins == {(expected, int(rank) if ranks == "2" else None)}
