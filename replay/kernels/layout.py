"""From SDPA's tensors to a library's and back.

Suffixes: B batch, H heads, S sequence, D head dimension, T tokens of all batch elements in a row.
SDPA has BHSD, with any strides; most libraries want BSHD, whose views usually cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.registry import Attention


class Run(Protocol):
    """A library's attention on tensors of its own layout."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool
    ) -> Tensor: ...


Prepare = Callable[[AttentionCall], Callable[[], Tensor]]


def refuse(attn_mask: Tensor | None, dropout_p: float) -> None:
    """What a kernel that has no counterpart for them does with them instead of ignoring them.

    Raises:
        NotImplementedError: there is a mask or dropout.
    """
    if attn_mask is not None:
        raise NotImplementedError("this kernel takes no attn_mask")
    if dropout_p > 0:
        raise NotImplementedError("this kernel has no dropout")


def unit_stride(tensor: Tensor) -> Tensor:
    """A copy where the elements of a head are not adjacent, which no fused kernel can read."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def on_bshd(run: Run) -> tuple[Attention, Prepare]:
    """The drop-in and the core of a kernel that takes and returns BSHD.

    The drop-in hands over transposed views, as diffusers does. The core gets contiguous BSHD, which
    is what the authors of these kernels measure.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        refuse(attn_mask, dropout_p)
        query, key, value = (unit_stride(each).transpose(1, 2) for each in (query, key, value))
        return run(query, key, value, scale, is_causal).transpose(1, 2)

    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        query, key, value = (
            each.transpose(1, 2).contiguous() for each in (call.query, call.key, call.value)
        )
        return lambda: run(query, key, value, call.scale, call.is_causal).transpose(1, 2)

    return attention, prepare


def on_bhsd(run: Run) -> Attention:
    """The drop-in of a kernel that takes and returns BHSD (HND, as the Sage family calls it)."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        refuse(attn_mask, dropout_p)
        return run(unit_stride(query), unit_stride(key), unit_stride(value), scale, is_causal)

    return attention


def padding_keys(attn_mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """(B, Sk) bool: the keys that a padding mask leaves.

    What `constraints.key_range` has found to be one: nothing is checked here, since that would make
    every timed call wait for the GPU.
    """
    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    return mask[:, 0, 0].expand(batch, kv_len)


@dataclass(frozen=True)
class Packed:
    """A padded batch without its padding: THD tensors and where each batch element begins."""

    query_THD: Tensor
    key_THD: Tensor
    value_THD: Tensor
    q_offsets: Tensor
    """(B + 1,) int32, as FlashAttention's `cu_seqlens_q`."""
    k_offsets: Tensor
    longest_query: int
    longest_key: int
    batch: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Packed:
        """BHSD tensors under a padding mask, packed.

        SDPA answers every query, those of padding tokens too, so only keys and values are packed.
        Finding the lengths waits for the GPU once, as it does in every model that does this.
        """
        batch, _, q_len, _ = query.shape
        keys = padding_keys(attn_mask, batch, key.shape[2])
        lengths = keys.sum(dim=1, dtype=torch.int32)
        return cls(
            query.transpose(1, 2).flatten(0, 1),
            key.transpose(1, 2)[keys],
            value.transpose(1, 2)[keys],
            torch.arange(batch + 1, dtype=torch.int32, device=query.device) * q_len,
            torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            q_len,
            int(lengths.max()),
            batch,
        )

    def unpack(self, output_THD: Tensor) -> Tensor:
        """The output as (B, H, S, D)."""
        return output_THD.unflatten(0, (self.batch, self.longest_query)).transpose(1, 2)
