"""Conversion of SDPA's tensors to a library's layout and back.

Suffixes: B batch, H heads, S sequence, D head dimension, T tokens of all sequences, concatenated.
SDPA takes BHSD with any strides. Most libraries take BSHD, for which a view is usually enough.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels.constraints import AnyCall
from replay.kernels.wrapping import Attend, Prepare


def in_layout(call: AnyCall, layout: Callable[[Tensor], Tensor]) -> Arguments:
    """Return the call with query, key and value in another layout."""
    return Arguments(
        layout(call.query), layout(call.key), layout(call.value), *_other_arguments(call)
    )


_OTHERS = Arguments._fields[3 : Arguments._fields.index("variant") + 1]
_other_arguments = operator.attrgetter(*_OTHERS)


def unit_stride(tensor: Tensor) -> Tensor:
    """Copy a tensor if the elements of a head are not adjacent, as fused kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def bshd(tensor_BHSD: Tensor) -> Tensor:
    """Return BSHD, as a view (as in diffusers) if the elements of a head are adjacent."""
    return unit_stride(tensor_BHSD).transpose(1, 2)


def contiguous_bshd(tensor_BHSD: Tensor) -> Tensor:
    """Return contiguous BSHD, the layout in which the authors of such kernels measure them."""
    return tensor_BHSD.transpose(1, 2).contiguous()


def on_bshd(run: Attend) -> tuple[Attend, Prepare]:
    """Return the drop-in and the core of a kernel that takes and returns BSHD."""

    def attend(call: Arguments) -> Tensor:
        return run(in_layout(call, bshd)).transpose(1, 2)

    def prepare(call: AnyCall) -> Callable[[], Tensor]:
        laid_out = in_layout(call, contiguous_bshd)
        return lambda: run(laid_out).transpose(1, 2)

    return attend, prepare


def on_bhsd(run: Attend) -> Attend:
    """Return the drop-in of a kernel that takes and returns BHSD (HND in the Sage family)."""
    return lambda call: run(in_layout(call, unit_stride))


def padding_keys(call: AnyCall) -> Tensor | None:
    """Return the keys visible under the call's padding mask, (B, Sk) bool; None without a mask.

    `constraints.key_range` has already checked the mask; checking it here would make every timed
    call wait for the GPU.
    """
    if call.attn_mask is None:
        return None
    mask = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)]
    return mask[:, 0, 0].expand(call.key.shape[0], call.key.shape[2])


@dataclass(frozen=True)
class Packed:
    """Concatenated sequences: THD tensors and the start of each sequence.

    The sequences come from a packed call, from a padded batch without its padding, or from a batch
    with key lengths (`seqused_k`). Keys in pages stay (P, page_size, H, D).
    """

    query_THD: Tensor
    key_THD: Tensor
    value_THD: Tensor
    q_offsets: Tensor
    """Starts of the queries, (N + 1,) int32: FlashAttention's `cu_seqlens_q`."""
    k_offsets: Tensor | None
    """Starts of the keys; None for keys in pages."""
    longest_query: int
    longest_key: int
    batch: int
    """Number of batch elements of the call; 1 for a packed call with any N."""
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None

    @classmethod
    def of(cls, call: AnyCall) -> Packed:
        """Pack a call that is already packed, or has a padding mask or key lengths.

        SDPA computes every query, including those of padding tokens, so only keys and values are
        packed. Computing unknown lengths waits for the GPU once, as in every model that packs
        sequences.
        """
        if call.page_table is not None:
            return cls._of_pages(call, call.page_table)
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            longest_q, longest_k = call.variant.max_seqlen_q, call.variant.max_seqlen_k
            return cls(
                thd(call.query),
                thd(call.key),
                thd(call.value),
                call.cu_seqlens_q,
                call.cu_seqlens_k,
                int(call.cu_seqlens_q.diff().max()) if longest_q is None else longest_q,
                int(call.cu_seqlens_k.diff().max()) if longest_k is None else longest_k,
                1,
                call.seqused_k,
            )
        batch, _, q_len, _ = call.query.shape
        q_offsets = even_offsets(batch, q_len, call.query.device)
        query = thd(call.query)
        # Leave keys beyond the lengths in place, because the kernel skips them.
        if call.seqused_k is not None:
            kv_len = call.key.shape[2]
            return cls(
                query,
                thd(call.key),
                thd(call.value),
                q_offsets,
                even_offsets(batch, kv_len, call.query.device),
                q_len,
                kv_len,
                batch,
                call.seqused_k,
            )
        # The only remaining case is a padding mask. The host waits until the GPU has computed the
        # lengths.
        keys = padding_keys(call)
        assert keys is not None, "a call without lengths has no padding"
        lengths = keys.sum(dim=1, dtype=torch.int32)
        return cls(
            query,
            call.key.transpose(1, 2)[keys],
            call.value.transpose(1, 2)[keys],
            q_offsets,
            torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            q_len,
            int(lengths.max()),
            batch,
        )

    @classmethod
    def _of_pages(cls, call: AnyCall, page_table: Tensor) -> Packed:
        batch, _, q_len, _ = call.query.shape
        offsets, longest_q = call.cu_seqlens_q, call.variant.max_seqlen_q
        if offsets is None:
            offsets, longest_q = even_offsets(batch, q_len, call.query.device), q_len
        longest_k = call.variant.max_seqlen_k
        room = page_table.shape[1] * call.key.shape[2]
        return cls(
            thd(call.query),
            bshd(call.key),
            bshd(call.value),
            offsets,
            None,
            int(offsets.diff().max()) if longest_q is None else longest_q,
            room if longest_k is None else longest_k,
            batch,
            call.seqused_k,
            page_table,
        )

    def unpack(self, output_THD: Tensor) -> Tensor:
        """Return the output as (B, H, S, D)."""
        return output_THD.unflatten(0, (self.batch, -1)).transpose(1, 2)


def on_packed(
    run: Callable[[AnyCall, Packed], Tensor],
) -> Callable[[AnyCall], Callable[[], Tensor]]:
    """Return the core of a function that takes and returns THD."""

    def prepare(call: AnyCall) -> Callable[[], Tensor]:
        packed = Packed.of(call)
        return lambda: packed.unpack(run(call, packed))

    return prepare


def thd(tensor_BHSD: Tensor) -> Tensor:
    """Return (B · S, H, D), a view if the memory layout allows it."""
    return unit_stride(tensor_BHSD).transpose(1, 2).flatten(0, 1)


def even_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the starts of equally long sequences in a packed tensor: (B + 1,) int32."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
