"""The bool masks of synthetic calls. True means attend, and every query attends to some key."""

from __future__ import annotations

import torch
from torch import Tensor

MASKS = ("none", "padding", "window", "random")
"""Values of `--mask`, besides `causal`, which sets `is_causal` instead."""

WINDOW = 1 / 8
"""Share of the keys that a query sees to each side."""


def random_mask(
    kind: str,
    sizes: tuple[int, int, int],
    device: torch.device | str,
    generator: torch.Generator | None,
) -> Tensor | None:
    """Return a mask of one of `MASKS` that broadcasts over heads.

    Args:
        sizes: batch size, query length and key length.
    """
    batch, q_len, kv_len = sizes
    if kind == "padding":  # (B, 1, 1, Sk): a length of at least half the keys for each sequence
        drawn = torch.rand(batch, 1, 1, 1, generator=generator, device=device)
        lengths = ((1 + drawn) / 2 * kv_len).ceil()
        return torch.arange(kv_len, device=device) < lengths
    if kind == "window":  # (1, 1, Sq, Sk): the keys around each query; the last ones are aligned
        query = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
        distance = (query - torch.arange(kv_len, device=device)).abs()
        nearest = distance == distance.amin(dim=1, keepdim=True)  # for queries before the first key
        return ((distance <= max(int(WINDOW * kv_len), 1)) | nearest)[None, None]
    if kind == "random":  # (1, 1, Sq, Sk): half of all (query, key) pairs, without structure
        kept = torch.rand(1, 1, q_len, kv_len, generator=generator, device=device) < 0.5
        kept[..., 0] = True
        return kept
    return None
