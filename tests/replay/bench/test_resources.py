"""Memory that a call needs, from simulated CUDA figures."""

import gc

import pytest
import torch

from replay.bench.resources import with_peak_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Simulate the current and the peak amount of allocated CUDA memory."""
    figures = {"now": 140, "most": 900}

    def allocate(count: int, *, device: torch.device) -> None:
        figures["now"] = 100  # other memory is freed once another stream finishes

    def reset(device: torch.device) -> None:
        figures["most"] = figures["now"]

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: figures["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: figures["most"])
    return figures


def test_peak_memory_excludes_earlier_allocations(memory: dict[str, int]) -> None:
    def call() -> None:
        assert not gc.isenabled()  # collecting garbage would reduce the call's memory
        memory["most"] = 130

    def fails() -> None:
        raise MemoryError

    assert with_peak_bytes(call, "cuda")[1] == 30
    assert gc.isenabled()
    with pytest.raises(MemoryError):
        with_peak_bytes(fails, "cuda")
    assert gc.isenabled()
