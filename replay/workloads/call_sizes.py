"""Sizes of synthetic calls, of any shape or from the suites of published comparisons.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention_replay.errors import Error
from capture.call.shape import Shape

LARGEST = 2**50
"""Maximum number of elements of a tensor (a petabyte), so that torch can count the bytes of all
tensors."""


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
                f"-hq {self.q_heads} is not a multiple of -hk {self.kv_heads}: "
                "every key/value head serves the same number of query heads"
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


def sizes_of(suite: str, longest: int | None = None) -> list[Sizes]:
    """Return a suite's shapes, without shapes longer than `longest`.

    Raises:
        ShapeError: no shape remains.
    """
    shapes = SUITES[suite][1]
    kept = [sizes for sizes in shapes if longest is None or sizes.longest <= longest]
    if not kept:
        shortest = min(sizes.longest for sizes in shapes)
        raise ShapeError(
            f"--max-seq {longest} excludes every shape of {suite}: the shortest is {shortest}"
        )
    return kept
