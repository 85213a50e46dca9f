"""GPU memory that a process keeps; the GPU is simulated."""

from __future__ import annotations

import pytest
import torch

from replay.workers.device_memory import give_back

GIB = 2**30


@pytest.mark.parametrize(
    ("reserved", "allocated", "free", "gives_back"),
    [(4, 1, 100, False), (8, 1, 100, True), (8, 7.9, 10, False), (2, 1, 4, True), (0, 0, 0, False)],
)
def test_large_unused_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch,
    reserved: float,
    allocated: float,
    free: float,
    gives_back: bool,
) -> None:
    given_back = []
    figures = {
        "memory_reserved": lambda device: int(reserved * GIB),
        "memory_allocated": lambda device: int(allocated * GIB),
        "mem_get_info": lambda device: (int(free * GIB), 141 * GIB),
        "empty_cache": lambda: given_back.append(True),
    }
    for name, function in figures.items():
        monkeypatch.setattr(torch.cuda, name, function)
    give_back(torch.device("cpu"))
    assert given_back == []
    give_back(torch.device("cuda", 0))
    assert bool(given_back) == gives_back
