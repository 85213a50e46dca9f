"""Sizes of synthetic calls, of any shape or from the suites of published comparisons.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from attention_replay.errors import Error
from capture.call.shape import Shape

LARGEST = 2**50
"""Maximum number of elements of a tensor (a petabyte), so that torch can count the bytes of all
tensors."""


MOST_CALLS = 1000
"""Maximum number of calls of one sweep."""


class ShapeError(Error):
    """Raised for invalid sizes of an attention call; the message gives the remedy."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a synthetic call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    is_causal: bool = False

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
                f"{self.q_heads} query heads cannot share {self.kv_heads} key/value heads: "
                "the first number must be a multiple of the second"
            )
        # Keys have at most as many heads as queries, so the queries' heads limit both.
        rows = self.batch * self.q_heads * self.longest
        if rows * max(self.head_dim, self.v_head_dim) > LARGEST:
            raise ShapeError("too large for any machine: give smaller sizes")

    @property
    def shape(self) -> Shape:
        return Shape(*(getattr(self, name) for name in Shape._fields))

    @property
    def longest(self) -> int:
        return max(self.q_len, self.kv_len)


def combinations(
    *,
    batch: Sequence[int] = (1,),
    q_heads: Sequence[int] = (16,),
    kv_heads: Sequence[int] | None = None,
    q_len: Sequence[int] = (1024,),
    kv_len: Sequence[int] | None = None,
    head_dim: Sequence[int] = (64,),
    v_head_dim: Sequence[int] | None = None,
    causal: Sequence[bool] = (False,),
) -> list[Sizes]:
    """Return the sizes of all combinations, with the lengths innermost.

    Without `kv_heads`, `kv_len` or `v_head_dim`, these sizes equal those of the query.

    Raises:
        ShapeError: a combination is not possible, or there are more than `MOST_CALLS`.
    """
    lists: list[Sequence[Any]] = [
        causal,
        batch,
        q_heads,
        (None,) if kv_heads is None else kv_heads,
        head_dim,
        (None,) if v_head_dim is None else v_head_dim,
        q_len,
        (None,) if kv_len is None else kv_len,
    ]
    number = math.prod(map(len, lists))
    if number > MOST_CALLS:
        raise ShapeError(
            f"the lists of sizes make {number:,} calls, and at most {MOST_CALLS:,} are allowed: "
            "shorten a list, or run the sweep in parts"
        )
    return [
        Sizes(b, hq, _or(hk, hq), sq, _or(sk, sq), d, _or(dv, d), is_causal)
        for is_causal, b, hq, hk, d, dv, sq, sk in product(*lists)
    ]


def _or(size: int | None, default: int) -> int:
    return default if size is None else size


def _square(
    batch: int, heads: int, length: int, dim: int, *, causal: bool = False, kv_heads: int = 0
) -> Sizes:
    return Sizes(batch, heads, kv_heads or heads, length, length, dim, dim, causal)


def _decode(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> Sizes:
    return Sizes(batch, heads, kv_heads, 1, length, dim, dim)


SUITES: dict[str, tuple[str, list[Sizes]]] = {
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
"""Suites by name, each with a description and its shapes."""
