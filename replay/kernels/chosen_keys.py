"""Masks of the keys that a sparse kernel attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall


def mask_of_tokens(indices: Tensor, call: AttentionCall) -> Tensor:
    """Return a bool mask (B, Hq, 1, Sk): True for the keys in `indices` (B, Hkv, K).

    Query heads that share a key head share its keys. Entries outside 0…Sk-1 are ignored.
    """
    shape = call.shape
    none = torch.tensor(shape.kv_len, device=indices.device)
    places = indices.long()
    places = torch.where((places < 0) | (places > none), none, places)
    mask = torch.zeros(
        (shape.batch, shape.kv_heads, shape.kv_len + 1), dtype=torch.bool, device=call.device
    )
    mask.scatter_(2, places, True)
    group = shape.q_heads // shape.kv_heads
    return mask[:, :, : shape.kv_len].repeat_interleave(group, dim=1)[:, :, None]


def mask_of_blocks(kept: Tensor, rows: int, keys: int, call: AttentionCall) -> Tensor:
    """Return a bool mask (B, Hq, Sq, Sk) from a map of kept blocks of `keys` keys for tiles of
    `rows` queries, which broadcasts to (B, Hq, tiles, blocks)."""
    shape = call.shape
    by_query = kept.repeat_interleave(rows, dim=2)[:, :, : shape.q_len]
    mask = by_query.repeat_interleave(keys, dim=3)[..., : shape.kv_len]
    return mask.expand(shape.batch, shape.q_heads, -1, -1)
