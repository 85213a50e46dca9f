"""A thread moves copies from a GPU to the host; here, host memory stands in for the GPU's."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture import load, record
from capture.recording import copies, mover
from capture.recording.copies import HostCopier, HostCopy, buffer_size
from capture.recording.counts import RecordingCounts
from capture.recording.memory import BufferPool
from tests.capture.recording.callers import Caller, assert_good, attend


class StandIn:
    """A GPU of this machine's memory, which may have little of it free."""

    free_bytes = 1 << 40
    is_fragmented = False

    def __init__(self) -> None:
        self.may_move = threading.Event()
        self.may_move.set()

    def info(self, gpu: torch.device) -> tuple[int, int]:
        return self.free_bytes, 1 << 40

    def clone(self, tensor: Tensor, **options: Any) -> Tensor:
        if self.is_fragmented:
            raise torch.OutOfMemoryError("no block is large enough")
        return torch.empty_like(tensor, **options).copy_(tensor)

    def wait(self, *_: object) -> None:
        assert self.may_move.wait(60)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    for name, function in {
        "Event": mock.MagicMock,
        "Stream": lambda: mock.MagicMock(wait_event=stand_in.wait),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "memory_reserved": lambda gpu: 0,
        "memory_allocated": lambda gpu: 0,
        "mem_get_info": stand_in.info,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(
        Tensor, "clone", lambda *given, **options: stand_in.clone(*given, **options)
    )
    monkeypatch.setattr(copies, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(mover, "PIECE", 1000)
    yield stand_in
    stand_in.may_move.set()


@pytest.mark.parametrize(
    ("free_copies", "is_fragmented", "staged"),
    [(1.9, False, 0), (2.1, False, 1), (8.0, False, 2), (8.0, True, 0)],
    ids=["no_room", "for_one", "for_two", "fragmented"],
)
def test_copies_wait_on_a_gpu_while_it_has_room_for_the_model_too(
    gpu: StandIn, free_copies: float, is_fragmented: bool, staged: int
) -> None:
    """Without room, the model waits. Later changes of the tensors do not affect the values."""
    tensors = {
        "query": torch.randn(2, 5, 3, 40).transpose(1, 2),
        "key": torch.randn(1, 2, 3, 300),
        "attn_mask": torch.rand(1, 1, 5, 7) > 0.5,
    }
    expected = {name: tensor + 0 for name, tensor in tensors.items()}
    gpu.free_bytes, gpu.is_fragmented = int(free_copies * buffer_size(tensors)), is_fragmented
    copier, original = HostCopier(1 << 40, RecordingCounts()), HostCopier._wait
    found: list[HostCopy] = []
    gpu.may_move.clear()

    def wait(*arguments: Any) -> None:
        gpu.may_move.set()
        original(*arguments)

    with mock.patch.object(HostCopier, "_wait", autospec=True, side_effect=wait) as waits:
        while not waits.called and len(found) < 9:
            found.append(copier.copy(tensors))
    assert len(found) == staged + 1
    for tensor in tensors.values():
        tensor.zero_()
    for copy in found:
        values = copy.arrival.result().tensors
        for name, layout in copy.layouts.items():
            assert torch.equal(layout.logical(values[name]), expected[name])
    copier.close()


def test_call_dropped_before_it_is_moved_is_never_moved(gpu: StandIn, tmp_path: Path) -> None:
    model, states = Caller(), [torch.randn(1, 2, 5, 8) for _ in range(20)]
    gpu.may_move.clear()
    with (
        mock.patch.object(
            BufferPool, "allocate", autospec=True, side_effect=BufferPool.allocate
        ) as allocated,
        record(model, tmp_path, max=3) as recording,
    ):
        for each in states:
            model(attend(each, each, each))
        gpu.may_move.set()
    assert recording.problems == []
    assert_good(load(tmp_path))
    assert recording.kept == 3
    assert allocated.call_count <= 4  # the kept calls, and one that was dropped on its way


def test_only_the_call_without_host_memory_is_lost(gpu: StandIn, tmp_path: Path) -> None:
    model, states, allocate = Caller(), torch.randn(1, 2, 64, 8), BufferPool.allocate
    errors = [None, MemoryError("no memory"), None]

    def fails_once(pool: BufferPool, nbytes: int) -> Tensor:
        if error := errors.pop():
            raise error
        return allocate(pool, nbytes)

    with (
        mock.patch.object(BufferPool, "allocate", fails_once),
        pytest.warns(match="no memory"),
        record(model, tmp_path, max=3) as recording,
    ):
        outputs = [model(attend(states, states, states))[0] for _ in range(3)]
    assert (recording.kept, recording.lost) == (2, 1)
    assert torch.equal(outputs[1], F.scaled_dot_product_attention(states, states, states))
    assert_good(load(tmp_path))
