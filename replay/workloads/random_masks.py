"""The bool masks of synthetic calls. True means attend, and every query attends to some key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mask = Callable[[int, int, int, torch.device, "torch.Generator | None"], Tensor]
"""Function of batch size, query length, key length, device and generator. It returns a mask that
broadcasts over heads."""

WINDOW = 1 / 8
"""Share of the keys that a query sees to each side."""


def _padding(
    batch: int, q_len: int, kv_len: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw a length of at least half the keys for each sequence: (B, 1, 1, Sk)."""
    drawn = torch.rand(batch, 1, 1, 1, generator=generator, device=device)
    lengths = ((1 + drawn) / 2 * kv_len).ceil()
    return torch.arange(kv_len, device=device) < lengths


def _window(
    batch: int, q_len: int, kv_len: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Let queries see the keys around them: (1, 1, Sq, Sk), with the last query at the last key."""
    query = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    distance = (query - torch.arange(kv_len, device=device)).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)  # for queries before the first key
    return ((distance <= max(int(WINDOW * kv_len), 1)) | nearest)[None, None]


def _random(
    batch: int, q_len: int, kv_len: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw half of all (query, key) pairs, without structure: (1, 1, Sq, Sk)."""
    kept = torch.rand(1, 1, q_len, kv_len, generator=generator, device=device) < 0.5
    kept[..., 0] = True
    return kept


MASKS: dict[str, Mask | None] = {
    "none": None,
    "padding": _padding,
    "window": _window,
    "random": _random,
}
"""Masks by their `--mask` name; `causal` sets `is_causal` instead."""
