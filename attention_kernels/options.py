"""Options of an attention call that `scaled_dot_product_attention` has no argument for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Window = tuple[int | None, int | None]
"""Numbers of keys that a query sees before and after the diagonal; None for all on that side."""


@dataclass(frozen=True)
class AttentionOptions:
    """Options beyond SDPA's arguments. The defaults give SDPA's behaviour.

    The score of query i and key j is `scale · q·k`. A soft cap replaces the score by `softcap ·
    tanh(score / softcap)`, and `attn_mask` is added afterwards. A causal mask and a window follow a
    diagonal: the diagonal key of query i is key i + δ. δ is 0 as in SDPA, or Sk - Sq with
    `bottom_right` as in FlashAttention.

    With `invariant`, the bits of a sequence's output depend neither on the other sequences of the
    batch nor, at prefill, on cutting its queries into chunks: each chunk has at least 64 queries
    and is aligned bottom right over the keys so far. Keys that a mask hides after the sequence's
    own change no bit either, except beside a window with a right side. Without `decode`, a call of
    `attention` with a few queries runs prefill's kernel, so that chunks of any size, single queries
    included, get the bits of prefill; with many keys, decode's kernel is much faster.

    With `deterministic` or `invariant`, gradients have the same bits in every run.

    `window` holds the numbers of keys that a query sees before and after its diagonal key, which it
    sees too; None for all keys on that side.

    Raises:
        ValueError: `softcap` is not a positive number below 1e30, or a side of `window` is
            negative.
    """

    bottom_right: bool = False
    window: Window = (None, None)
    softcap: float | None = None
    invariant: bool = False
    decode: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        left, right = self.window
        if (left or 0) < 0 or (right or 0) < 0:
            raise ValueError(f"invalid window {self.window}: expected None or 0 and more, per side")
        if self.softcap is not None and not 0 < self.softcap < 1e30:
            raise ValueError(
                f"invalid softcap {self.softcap:g}: expected a positive number below 1e30, or None"
            )


PLAIN = AttentionOptions()
"""Options of SDPA itself."""
INVARIANT = AttentionOptions(invariant=True)


class Lengths(NamedTuple):
    """Rows of the tensors that belong to each batch element; `forward_kernel.rows_of` reads it."""

    kind: str
    batches: int
    longest_query: int
    q_offsets: Tensor | None = None
    k_starts: Tensor | None = None
    k_lengths: Tensor | None = None


def is_leading_part(part: Tensor, whole: Tensor) -> bool:
    """Return whether `part` is a view `whole[..., :n]` of the same memory, not a copy."""
    if part.shape[:-1] != whole.shape[:-1] or not 0 < part.shape[-1] <= whole.shape[-1]:
        return False
    same_strides = all(
        size == 1 or own == other
        for size, own, other in zip(part.shape, part.stride(), whole.stride(), strict=True)
    )
    same_memory = 0 != part.data_ptr() == whole.data_ptr()
    return same_strides and same_memory and part.dtype == whole.dtype
