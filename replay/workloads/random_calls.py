"""Calls with random values, of any shape or from the suites of published comparisons."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from capture.call.attention_call import AttentionCall, Origin
from capture.storage.header import dtype_name
from replay.workloads.call_sizes import Sizes
from replay.workloads.distributions import DISTRIBUTIONS, Values
from replay.workloads.random_masks import random_mask
from replay.workloads.suites import sizes_of


def random_weights(distribution: str) -> str:
    """Return the `weights` entry for rows of calls with this distribution."""
    drawn = "standard normal" if distribution == "normal" else distribution
    return f"none: random values, {drawn}"


@dataclass(frozen=True)
class Spec(Sizes):
    """Sizes and kind of values of a synthetic call."""

    dtype: torch.dtype = torch.bfloat16
    distribution: str = "normal"
    """Name of one of `replay.workloads.distributions.DISTRIBUTIONS`."""
    mask: str = "none"
    """Name of one of `replay.workloads.random_masks.MASKS`, which combines with `is_causal`."""
    scale: float | None = None

    def call(
        self, device: torch.device | str, generator: torch.Generator | None = None, name: str = ""
    ) -> AttentionCall:
        """Make a call of this shape with contiguous (B, H, S, D) tensors."""

        def normal(heads: int, length: int, dim: int) -> torch.Tensor:
            size = (self.batch, heads, length, dim)
            # Draw in float32, because bfloat16 `randn` differs between devices and versions.
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        values = Values(
            normal(self.q_heads, self.q_len, self.head_dim),
            normal(self.kv_heads, self.kv_len, self.head_dim),
            normal(self.kv_heads, self.kv_len, self.v_head_dim),
        )
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        values = DISTRIBUTIONS[self.distribution].apply(values, scale)
        sizes = (self.batch, self.q_len, self.kv_len)
        query, key, value = (tensor.to(self.dtype) for tensor in values)
        return AttentionCall(
            query,
            key,
            value,
            attn_mask=random_mask(self.mask, sizes, device, generator),
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.q_heads != self.kv_heads,
            origin=Origin(model=name, weights=random_weights(self.distribution), phase="synthetic"),
        )

    def without_values(self) -> AttentionCall:
        """Make a call of these sizes on the `meta` device, without its mask.

        No values are drawn: on `meta`, that would import much of PyTorch's compiler, which takes a
        second and a half.
        """

        def empty(heads: int, length: int, dim: int) -> torch.Tensor:
            return torch.empty((self.batch, heads, length, dim), dtype=self.dtype, device="meta")

        return AttentionCall(
            empty(self.q_heads, self.q_len, self.head_dim),
            empty(self.kv_heads, self.kv_len, self.head_dim),
            empty(self.kv_heads, self.kv_len, self.v_head_dim),
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.q_heads != self.kv_heads,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        return cls(**{**data, "dtype": dtype(data["dtype"])})


def suite(name: str, dtype_: str = "bfloat16", longest: int | None = None) -> list[Spec]:
    """Return a suite's shapes in the given dtype; see `sizes_of`.

    Raises:
        ShapeError: no shape remains, or a file of shapes cannot be used.
    """
    return [Spec(**vars(sizes), dtype=dtype(dtype_)) for sizes in sizes_of(name, longest)]


def dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name, such as `torch.bfloat16` for `bfloat16`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
