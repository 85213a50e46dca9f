"""Calls with random values, of any shape or from the suites of published comparisons."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall, Origin
from capture.call.shape import Shape
from capture.storage.header import dtype_name
from replay.workloads.distributions import DISTRIBUTIONS, Values
from replay.workloads.random_masks import random_mask


def random_weights(distribution: str) -> str:
    """Return the `weights` entry for rows of calls with this distribution."""
    drawn = "standard normal" if distribution == "normal" else distribution
    return f"none: random values, {drawn}"


class ShapeError(Error):
    """Raised for invalid sizes of an attention call; the message gives the remedy."""


@dataclass(frozen=True)
class Spec:
    """Sizes and kind of values of a synthetic call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    is_causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    distribution: str = "normal"
    """Name of one of `replay.workloads.distributions.DISTRIBUTIONS`."""
    mask: str = "none"
    """Name of one of `replay.workloads.random_masks.MASKS`, which combines with `is_causal`."""
    scale: float | None = None

    def __post_init__(self) -> None:
        sizes = {
            "-b": self.batch,
            "-hq": self.q_heads,
            "-hk": self.kv_heads,
            "-sq": self.q_len,
            "-sk": self.kv_len,
            "-d": self.head_dim,
            "-dv": self.v_head_dim,
        }
        for flag, size in sizes.items():
            if size < 1:
                raise ShapeError(f"{flag} must be at least 1, not {size}")
        if self.q_heads % self.kv_heads:
            raise ShapeError(
                f"-hq {self.q_heads} is not a multiple of -hk {self.kv_heads}: "
                "every key/value head serves the same number of query heads"
            )

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

    @property
    def shape(self) -> Shape:
        return Shape(*(getattr(self, name) for name in Shape._fields))

    @property
    def longest(self) -> int:
        return max(self.q_len, self.kv_len)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        return cls(**{**data, "dtype": dtype(data["dtype"])})


def _square(
    batch: int, heads: int, length: int, dim: int, *, causal: bool = False, kv_heads: int = 0
) -> Spec:
    return Spec(batch, heads, kv_heads or heads, length, length, dim, dim, causal)


def _decode(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> Spec:
    return Spec(batch, heads, kv_heads, 1, length, dim, dim)


SUITES: dict[str, tuple[str, list[Spec]]] = {
    "flux": (
        "FLUX.1 at 1024²: 4096 image tokens and six text lengths",
        [_square(1, 24, 4096 + text, 128) for text in (128, 256, 320, 384, 448, 512)],
    ),
    "sage": (
        "SageAttention's charts: B=4, H=32, 1K to 32K, head_dim 64 and 128, causal and not",
        [
            _square(4, 32, length, dim, causal=causal)
            for dim in (64, 128)
            for causal in (False, True)
            for length in (1024, 2048, 4096, 8192, 16384, 32768)
        ],
    ),
    "aiter": (
        "AITER's diffusion shapes, head_dim 128",
        [
            _square(1, 5, 75600, 128),
            _square(1, 24, 16452, 128),
            _square(1, 3, 118808, 128),
            _square(2, 2, 29760, 128),
        ],
    ),
    "cogvideo": (
        "CogVideoX-2b and -5b, 480×720, 49 frames",
        [_square(2, 30, 17776, 64), _square(2, 48, 17776, 64)],
    ),
    "llama": (
        "Llama-2-7b and Llama-3.1-8B: prefill and decode",
        [
            _square(1, 32, 4096, 128, causal=True),
            _square(1, 32, 8192, 128, causal=True, kv_heads=8),
            _square(8, 64, 1024, 64, causal=True, kv_heads=16),
            _decode(8, 32, 8, 32768, 128),
            _decode(8, 64, 16, 1024, 64),
        ],
    ),
}
"""Suites by name, each with a description and its shapes in bfloat16."""


def suite(name: str, dtype_: str = "bfloat16", longest: int | None = None) -> list[Spec]:
    """Return a suite's shapes in the given dtype, without shapes longer than `longest`.

    Raises:
        ShapeError: no shape remains.
    """
    specs = [replace(spec, dtype=dtype(dtype_)) for spec in SUITES[name][1]]
    kept = [spec for spec in specs if longest is None or spec.longest <= longest]
    if not kept:
        shortest = min(spec.longest for spec in specs)
        raise ShapeError(
            f"--max-seq {longest} excludes every shape of {name}: the shortest is {shortest}"
        )
    return kept


def dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name, such as `torch.bfloat16` for `bfloat16`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
