"""Calls derived from a recorded call for an experiment, each with its own reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.block_mask import is_block_mask
from capture.call.per_head import numbers_of_heads
from capture.call.strides import narrow_expanded, picked

UNGATHERED = {"packed", "paged", "key-lengths"}
"""Features that store lengths outside the tensors; gathering rows would make the lengths wrong."""


class HeadRows(NamedTuple):
    """Rows of one head of an output."""

    batch: int
    head: int
    """Index of the query head."""
    queries: Tensor
    """Indices of the queries: (R,) int64."""


def can_be_gathered(call: AttentionCall) -> bool:
    """Return True if queries and keys of a call can be left out or repeated."""
    return UNGATHERED.isdisjoint(call.features)


def gathered(
    call: AttentionCall, *, queries: Tensor | None = None, keys: Tensor | None = None
) -> AttentionCall:
    """Return the call with some of its queries and keys, in the given order.

    Causal masks and windows apply to the new positions. The tensors keep the memory order of their
    dimensions, without gaps.

    Args:
        queries: (n,) indices, which may repeat; None for all queries. `keys` has the same form.
    """
    found: dict[str, Tensor] = {}
    mask = call.attn_mask
    if queries is not None:
        found["query"] = picked(call.query, 2, queries)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            mask = picked(mask, mask.ndim - 2, queries)
    if keys is not None:
        found["key"], found["value"] = (picked(each, 2, keys) for each in (call.key, call.value))
        if mask is not None and mask.shape[-1] > 1:
            mask = picked(mask, mask.ndim - 1, keys)
    if mask is not None:
        found["attn_mask"] = mask
    return replace(call.with_tensors(found), output=None)


def padded_sizes(dim: int) -> list[int]:
    """Return the sizes that kernels pad a head dimension to: multiples, and a power of two."""
    whole = [-(-dim // step) * step for step in (8, 16, 32, 64, 128)]
    return [*whole, 1 << dim.bit_length()]


def mapped(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to a tensor. PyTorch has no arithmetic in float8, so 8 bits are widened."""
    if tensor.itemsize > 1:
        return function(tensor)
    limits = torch.finfo if tensor.is_floating_point() else torch.iinfo
    most = limits(tensor.dtype).max
    return function(tensor.float()).clamp(-most, most).to(tensor.dtype)


def changed(call: AttentionCall) -> AttentionCall:
    """Return the call with different values of equal size: -Q, K in reverse order, and -V.

    The first element of each tensor stays unchanged, because a cache may use it to identify calls.
    """
    found = call.to(call.device).tensors()
    for name in ("query", "key", "value"):
        stored = narrow_expanded(found[name])
        if not stored.numel():  # the call has no keys
            continue
        turned = stored.clone() if name == "value" else stored.flip(2)
        if name == "value" and call.value_is_in_key:
            continue
        first = stored.flatten()[0].clone()
        stored.copy_(turned if name == "key" else mapped(turned, torch.neg))
        stored[(0,) * stored.ndim] = first
    found.pop("output", None)
    return call.with_tensors(found)


def write(target: AttentionCall, values: AttentionCall) -> None:
    """Write the values of another call's inputs into a call's memory."""
    given = values.tensors()
    for name, tensor in target.tensors().items():
        if name in given and name != "output":
            narrow_expanded(tensor).copy_(narrow_expanded(given[name]))


def part(call: AttentionCall, place: HeadRows) -> AttentionCall:
    """Return rows of one head as a call (1, 1, R, D) that is limited only by a mask."""
    call = call.without_pages()
    batch, head, rows = place
    kv_head = head // (call.shape.q_heads // call.shape.kv_heads)
    mask = mask_of(call, batch, head, rows)
    if call.is_causal or call.features:
        visible = seen(call, batch, rows)
        if mask is None:
            mask = visible
        elif mask.dtype == torch.bool:
            mask = mask & visible
        else:
            mask = mask.masked_fill(~visible, -torch.inf)
    return AttentionCall(
        call.query[batch, head, rows][None, None],
        call.key[batch, kv_head][None, None],
        call.value[batch, kv_head][None, None],
        attn_mask=None if mask is None else mask[None, None],
        scale=call.scale,
        variant=AttentionVariant(softcap=call.variant.softcap),
        **numbers_of_heads(call.tensors(), [head], [kv_head]),
    )


def mask_of(call: AttentionCall, batch: int, head: int, rows: Tensor) -> Tensor | None:
    """Return the rows (R, Sk) of one head's `attn_mask`; None if the call has no mask."""
    if call.attn_mask is None:
        return None
    shape, mask = call.shape, call.attn_mask
    if is_block_mask(mask):
        whole = mask.expand(shape.batch, shape.q_heads, -1, -1, -1, -1)
        return whole[batch, head, rows // mask.shape[3], 0].flatten(1)[:, : shape.kv_len]
    sizes = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    return mask.expand(sizes)[batch, head, rows]


def seen(call: AttentionCall, batch: int, rows: Tensor) -> Tensor:
    """Return a bool tensor (R, Sk) of the keys visible to each row, ignoring `attn_mask`."""
    firsts, ends = (each[rows, None] for each in call.key_ranges.of(batch))
    position = torch.arange(call.shape.kv_len, device=call.device)
    return (position >= firsts) & (position < ends)


def scores(small: AttentionCall) -> Tensor:
    """Return the scores scale · q·k (R, Sk) of a call from `part`, unmasked and in float64."""
    small = small.without_scales()
    query, key = (each[0, 0].to(torch.float64) for each in (small.query, small.key))
    return query @ key.mT * small.softmax_scale
