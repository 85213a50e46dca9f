"""Bool masks of synthetic calls. True means visible, and every query has a visible key."""

from __future__ import annotations

import torch
from torch import Tensor

MASKS = ("none", "padding", "window", "random")
"""Values of `--mask` except `causal`, which sets `is_causal` instead."""

WINDOW = 1 / 8
"""Share of the keys that are visible on each side of a query."""


def random_mask(
    kind: str,
    sizes: tuple[int, int, int],
    device: torch.device | str,
    generator: torch.Generator | None,
) -> Tensor | None:
    """Return a mask of a kind in `MASKS`, which broadcasts over heads; None for `none`.

    Args:
        sizes: batch size, query length and key length.
    """
    batch, q_len, kv_len = sizes
    if kind == "padding":  # (B, 1, 1, Sk): each sequence keeps at least half of the keys
        drawn = torch.rand(batch, 1, 1, 1, generator=generator, device=device)
        lengths = ((1 + drawn) / 2 * kv_len).ceil()
        return torch.arange(kv_len, device=device) < lengths
    if kind == "window":  # (1, 1, Sq, Sk): keys near each query; the last query is at the last key
        query = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
        distance = (query - torch.arange(kv_len, device=device)).abs()
        nearest = distance == distance.amin(dim=1, keepdim=True)  # if a query precedes all keys
        return ((distance <= max(int(WINDOW * kv_len), 1)) | nearest)[None, None]
    if kind == "random":  # (1, 1, Sq, Sk): a random half of all (query, key) pairs
        kept = torch.rand(1, 1, q_len, kv_len, generator=generator, device=device) < 0.5
        kept[..., 0] = True
        return kept
    return None
