"""Calls of our kernels whose keys and values lie in pages, as they were captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call.attention_variant import output_dtype
from replay.kernels.constraints import AnyCall, longest_query
from replay.kernels.kernel_options import kernel_options
from replay.kernels.libraries import imported


def as_int32(tensor: Tensor) -> Tensor:
    """Return an int32 tensor; PyTorch is not called if the tensor is int32 already."""
    return tensor if tensor.dtype == torch.int32 else tensor.int()


def scale_of_keys(call: AnyCall) -> Tensor | None:
    """Return the scale of the keys, times that of queries in 8 bits, which have the same heads."""
    if call.query_scale is None or call.key_scale is None:
        return call.key_scale
    return call.key_scale * call.query_scale


def prepare_batch(call: AnyCall) -> Callable[[], Tensor]:
    """Return `paged_batch` for a call with a page table, whose queries are packed or padded.

    Queries in 8 bits are converted to bfloat16, without their scale, which makes them exact.
    """
    attend = imported("attention_kernels.decode.paged_batch", "paged_batch")
    assert call.page_table is not None
    assert call.seqused_k is not None
    batch, _, q_len, _ = call.query.shape
    query_THD, offsets = call.query.transpose(1, 2).flatten(0, 1), call.cu_seqlens_q
    is_packed = offsets is not None
    if offsets is None:
        offsets = torch.arange(batch + 1, device=call.query.device) * q_len
    arguments = (
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        as_int32(call.page_table),
        as_int32(call.seqused_k),
        as_int32(offsets),
        longest_query(call),
        call.is_causal,
    )
    options = kernel_options(call.variant)
    dtype, key_scale = output_dtype(call), scale_of_keys(call)

    def run() -> Tensor:
        output_THD: Tensor = attend(
            query_THD.to(dtype),
            *arguments,
            scale=call.scale,
            key_scale=key_scale,
            value_scale=call.value_scale,
            sinks=call.sinks,
            options=options,
        )
        if is_packed:
            return output_THD.transpose(0, 1)[None]
        return output_THD.unflatten(0, (batch, q_len)).transpose(1, 2)

    return run
