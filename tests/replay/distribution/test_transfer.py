"""Recorded calls are sent to another machine."""

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from capture.errors import DatasetError
from replay.distribution.node import Node
from replay.distribution.ray_cluster import RemoteWorkers
from replay.distribution.transfer import FileFacts
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import from_directory
from replay.workloads.sources import RandomSource, Source
from replay.workloads.workload import with_counterparts


class Method(NamedTuple):
    """Method of an actor, run immediately in this process."""

    remote: Any


class Direct(RemoteWorkers):
    """Workers whose node is in this process."""

    def __init__(self, node: Node) -> None:
        super().__init__(self, "node", threading.Lock(), threading.Event())
        self.expect = Method(node.expect)
        self.sent: list[str] = []
        self.receive = Method(
            lambda *told: (self.sent.append(told[0].path.name), node.receive(*told))
        )

    def get(self, answer: Any, deadline: float = 0.0) -> Any:
        return answer


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Direct:
    """Workers on a machine that shares no files with this one and sees only what it is sent."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = FileFacts.is_at

    def is_at(facts: FileFacts, path: Path) -> bool:
        return path.is_relative_to(tmp_path / "cache") and here(facts, path)

    monkeypatch.setattr(FileFacts, "is_at", is_at)
    return Direct(Node((0, 1), os.getcwd(), {}, 60.0))


def loaded(source: Source) -> torch.Tensor:
    return source.load(torch.device("cpu")).query


def test_call_is_sent_once_and_is_the_same_there(recorded: Path, elsewhere: Direct) -> None:
    workloads, _ = from_directory(recorded)
    for workload in (*workloads, *workloads):
        there = elsewhere._sent(workload.source)
        assert there.files()[0].parent != recorded
        assert loaded(there).equal(loaded(workload.source))
    assert elsewhere.sent == [f"model-{index:06d}.safetensors" for index in range(3)]


def test_shared_file_stays(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workloads, _ = from_directory(recorded)
    near = Direct(Node((0, 1), os.getcwd(), {}, 60.0))
    assert [near._sent(each.source) for each in workloads] == [each.source for each in workloads]
    assert not near.sent


def test_another_file_of_this_name_is_not_taken_for_it(recorded: Path, elsewhere: Direct) -> None:
    (workload, *_), _ = from_directory(recorded)
    (there,) = elsewhere._sent(workload.source).files()
    there.write_bytes(there.read_bytes()[:-1] + b"?")
    assert loaded(elsewhere._sent(workload.source)).equal(loaded(workload.source))
    assert len(elsewhere.sent) == 2


def test_counterparts_send_files_and_random_calls_none(recorded: Path, elsewhere: Direct) -> None:
    workloads, _ = from_directory(recorded)
    _, twin, _ = with_counterparts(workloads[:1], 0)
    assert loaded(elsewhere._sent(twin.source)).equal(loaded(twin.source))
    random = RandomSource("random", "random", Spec(1, 1, 1, 4, 4, 8, 8), 0)
    assert elsewhere._sent(random) == random


def test_unreadable_file_is_left_to_the_node(recorded: Path, elsewhere: Direct) -> None:
    (workload, *_), _ = from_directory(recorded)
    (recorded / "model-000000.safetensors").unlink()
    assert elsewhere._sent(workload.source) == workload.source
    with pytest.raises(DatasetError):
        loaded(workload.source)
