"""Scratch memory of a launch of decode."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import split_kv


def watched_rooms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Fill the memory that calls get for their parts with NaN, and their counters with zeros;
    record both."""
    rooms: list[tuple[Tensor, Tensor]] = []

    def workspace(numbers: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        room = torch.full((numbers,), math.nan, device=device)
        rooms.append((room, torch.zeros(count, dtype=torch.int32, device=device)))
        return rooms[-1]

    monkeypatch.setattr(split_kv, "workspace", workspace)
    return rooms
