"""GPU memory that a process keeps; the GPU is simulated."""

import pytest
import torch

from replay.workers.device_memory import give_back

GIB = 2**30


@pytest.mark.parametrize(
    ("reserved", "allocated", "free", "gives_back"),
    [(4, 1, 100, False), (8, 1, 100, True), (8, 7.9, 10, False), (2, 1, 4, True), (0, 0, 0, False)],
)
def test_large_unused_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch, reserved: int, allocated: float, free: int, gives_back: bool
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: int(allocated * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    give_back(torch.device("cpu"))
    assert given_back == []
    give_back(torch.device("cuda", 0))
    assert bool(given_back) == gives_back
