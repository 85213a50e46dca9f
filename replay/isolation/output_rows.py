"""Some rows of an output, and small calls that compute only these rows."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.block_mask import is_block_mask
from capture.call.per_head import PER_HEAD, numbers_of_heads

Places = tuple[Tensor, Tensor, Tensor]
"""Indices of batches, heads and queries, on the device of the output that they index."""


class OutputRows(NamedTuple):
    """Positions of rows in an output (B, Hq, Sq, Dv). Each list has one entry per row."""

    batch: list[int]
    head: list[int]
    query: list[int]

    def of(self, output: Tensor) -> Tensor:
        """Return a copy of these rows: (n, Dv)."""
        return output[self.on(output.device)]

    def on(self, device: torch.device) -> Places:
        """Return the indices as tensors on a device, without waiting for a GPU."""
        indices = torch.tensor(self)
        if device.type == "cuda":
            indices = indices.pin_memory().to(device, non_blocking=True)
        batch, head, query = indices
        return batch, head, query


def some_rows(call: AttentionCall, rows: OutputRows) -> AttentionCall:
    """Make a call that computes only these rows of one key head, (1, 1, n, D), with a mask."""
    call = call.without_pages()
    shape = call.shape
    group = max(shape.q_heads // shape.kv_heads, 1)
    batch, kv_head = rows.batch[0], rows.head[0] // group
    at = rows.on(call.device)
    mask = None
    if call.attn_mask is not None:
        whole, where = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)], at
        if is_block_mask(whole):
            whole, where = whole[:, :, :, 0], (at[0], at[1], at[2] // whole.shape[3])
        places = (
            index.clamp(max=size - 1) for index, size in zip(where, whole.shape[:3], strict=True)
        )
        by_key = whole[tuple(places)].flatten(1)[:, : shape.kv_len]
        mask = by_key.expand(-1, shape.kv_len)[None, None]
    if call.is_causal or call.features:
        first, end = (edge[at[2], None] for edge in call.key_ranges.of(batch))
        position = torch.arange(shape.kv_len, device=call.device)
        visible = ((position >= first) & (position < end))[None, None]
        if mask is None:
            mask = visible
        elif mask.dtype == torch.bool:
            mask = mask & visible
        else:
            mask = mask.masked_fill(~visible, float("-inf"))
    return replace(
        call,
        query=call.query[at][None, None],
        key=call.key[batch, kv_head][None, None],
        value=call.value[batch, kv_head][None, None],
        attn_mask=mask,
        is_causal=False,
        enable_gqa=False,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
        variant=AttentionVariant(softcap=call.variant.softcap),
        output=None,
        **numbers_of_heads(call.tensors(), [rows.head[0]], [kv_head]),
    )


def side_by_side(*calls: AttentionCall) -> AttentionCall:
    """Join calls made by `some_rows` into one call, in which each has its own head."""
    joined = {
        name: torch.cat([call.tensors()[name] for call in calls], 0 if name in PER_HEAD else 1)
        for name in calls[0].tensors()
    }
    return calls[0].with_tensors(joined)
