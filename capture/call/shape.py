"""Sizes of one attention call. Does not import torch.

Shape letters used throughout this project: B batch, Hq query heads, Hkv key/value heads (Hq is a
multiple of Hkv), Sq query length, Sk key length, D head dimension, Dv the value's head dimension.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple


class Shape(NamedTuple):
    """Sizes of one attention call."""

    batch: Annotated[int, "B"]
    q_heads: Annotated[int, "Hq, query heads"]
    kv_heads: Annotated[int, "Hkv, key/value heads"]
    q_len: Annotated[int, "Sq, query length"]
    kv_len: Annotated[int, "Sk, key length"]
    head_dim: Annotated[int, "D, of query and key"]
    v_head_dim: Annotated[int, "Dv, of value and output"]

    def __str__(self) -> str:
        """Format as `2×30/6×17776/226×64`: batch, heads (q/kv), lengths (q/k), head dim (qk/v)."""

        def pair(a: int, b: int) -> str:
            return str(a) if a == b else f"{a}/{b}"

        return "×".join(
            (
                str(self.batch),
                pair(self.q_heads, self.kv_heads),
                pair(self.q_len, self.kv_len),
                pair(self.head_dim, self.v_head_dim),
            )
        )
