"""Workloads of recorded calls, and how worker processes load them."""

import json
from pathlib import Path

import pytest
import torch

from capture.errors import DatasetError
from capture.storage.call_file import PackedCall
from replay.bench.runner import replay_here
from replay.workloads.recorded import from_directory
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload
from tests.factories import kernel, random_call, settings, store_part

CPU = torch.device("cpu")


def through_json(workload: Workload) -> Workload:
    """Return the workload as a worker process rebuilds it."""
    return Workload.of(source_from_json(json.loads(json.dumps(workload.source.to_json()))))


def test_recordings_are_loaded(tmp_path: Path) -> None:
    call = random_call(origin={"call_index": 3}, with_output=True)
    PackedCall.of(call).write(tmp_path / "model-000003.safetensors")
    workloads, note = from_directory(tmp_path)
    assert [workload.name for workload in workloads] == ["model-000003"]
    assert "manifest.json is missing" in note
    loaded = workloads[0].load(CPU)
    assert torch.equal(loaded.query, call.query)
    path = tmp_path / "model-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DatasetError, match=r"model-000003\.safetensors: "):
        workloads[0].load(CPU)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A directory of three recorded calls: one is truncated, and one is a link."""
    paths = [tmp_path / f"model-{index}.safetensors" for index in range(3)]
    for index, path in enumerate(paths):
        PackedCall.of(random_call(origin={"call_index": index})).write(path)
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    paths[1].symlink_to(paths[1].rename(tmp_path / "elsewhere"))
    return tmp_path


def test_damaged_file_costs_one_row(damaged: Path) -> None:
    workloads, _ = from_directory(damaged)
    assert len(workloads) == 3
    for each in (workloads, [through_json(each) for each in workloads]):
        rows = list(replay_here(each, [kernel("fast")], settings()))
        assert len([row for row in rows if row.kernel == "fast"]) == 1
        reasons = [row.reason for row in rows if not row.kernel]
        assert len(reasons) == 2
        assert "model-0.safetensors: not a readable" in reasons[0]
        assert "model-1.safetensors: a symbolic link" in reasons[1]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A call that two ranks share, and a call that lacks the part of one rank."""
    for rank in (0, 1):
        store_part(tmp_path, random_call(q_heads=4), rank, [0, 1])
    store_part(tmp_path, random_call(q_heads=4), 0, [0, 1], call_index=1, step=1)
    return tmp_path


def test_parts_of_ranks_are_replayed_with_a_note(parts: Path) -> None:
    workloads, note = from_directory(parts)
    assert [each.load(CPU).shape.q_heads for each in workloads] == [2, 2, 2]
    assert "these calls are parts that ranks share: --join-ranks replays whole calls" in note


def test_whole_calls_are_joined_on_request_also_by_a_worker(parts: Path) -> None:
    workloads, note = from_directory(parts, join_ranks=True)
    assert [each.name for each in workloads] == ["model.ranks0-1-000000"]
    assert "1 call is left out" in note
    again = through_json(workloads[0])
    for each in (workloads[0], again):
        call = each.load(CPU)
        assert (each.name, call.origin.model) == ("model.ranks0-1-000000", "model")
        assert torch.equal(call.query, random_call(q_heads=4).query)


def test_metadata_of_a_joined_call_follow_from_its_parts(parts: Path) -> None:
    whole, *_ = from_directory(parts, join_ranks=True)[0]
    part, *_ = from_directory(parts)[0]
    shape = part.source.metadata().shape
    assert whole.source.metadata().shape == shape._replace(q_heads=2 * shape.q_heads)
    assert whole.source.metadata().form != part.source.metadata().form


def test_calls_that_cannot_be_joined_are_refused(parts: Path, tmp_path: Path) -> None:
    for path in parts.glob("*rank1*"):
        path.unlink()
    with pytest.raises(DatasetError, match=r"2 calls are left out.*leave out --join-ranks to"):
        from_directory(parts, join_ranks=True)
    whole = tmp_path / "whole"
    store_part(whole, random_call(q_heads=4), 0, [0], split="", split_ranks=[])
    with pytest.raises(DatasetError, match="every call is whole, none is shared by ranks"):
        from_directory(whole, join_ranks=True)
