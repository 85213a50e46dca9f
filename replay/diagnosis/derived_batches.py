"""Calls with some sequences of a recorded call: alone, in other company, or in chunks of queries.

A sequence is a batch element or, in a packed call, the rows between two entries of `cu_seqlens_q`.
The calls keep the memory order of dimensions, without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import concatenated
from replay.diagnosis.derived import mapped


class Part(NamedTuple):
    """Queries of a sequence of a call."""

    call: AttentionCall
    position: int = 0
    """Index of the sequence in the call."""
    queries: slice = slice(None)


class Trial(NamedTuple):
    """Two ways to compute the same output."""

    place: str
    """Words for the second way: `sequence 2 alone`."""
    expected: Part
    other: Part


def lengths(call: AttentionCall) -> list[tuple[int, int]]:
    """Return the number of queries and of keys of each sequence."""
    count = call.query.shape[0] if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    queries, keys = [call.shape.q_len] * count, [call.shape.kv_len] * count
    if call.cu_seqlens_q is not None:
        queries = call.cu_seqlens_q.diff().tolist()
    if call.seqused_k is not None:
        keys = call.seqused_k.tolist()
    elif call.cu_seqlens_k is not None:
        keys = call.cu_seqlens_k.diff().tolist()
    return list(zip(queries, keys, strict=True))


def rows(output: Tensor, part: Part) -> Tensor:
    """Return the output of a part, (1, Hq, Sq, Dv), from that of its call."""
    return _sequence(output, part.call.cu_seqlens_q, part.position)[:, :, part.queries]


def of_sequences(
    call: AttentionCall, order: Sequence[int], own: int | None = None
) -> AttentionCall:
    """Return a call of some sequences, which may repeat, in the given order.

    Args:
        order: indices of the sequences.
        own: position in `order` of the only sequence that keeps its values. All others get the
            values -2Q, -2K and -2V, in pages of their own. None: all sequences keep their values.
    """
    index = torch.tensor(order, device=call.device)
    is_other = [own is not None and position != own for position in range(len(order))]
    found = {"query": _joined(call.query, call.cu_seqlens_q, order, is_other)}
    for name, pool_or_rows in (("key", call.key), ("value", call.value)):
        if call.page_table is None:
            found[name] = _joined(pool_or_rows, call.cu_seqlens_k, order, is_other)
        elif any(is_other):
            found[name] = concatenated([pool_or_rows, _other_values(pool_or_rows)], 0)
    if call.value_is_in_key and "key" in found:
        found["value"] = found["key"][..., : call.value.shape[-1]]
    if call.page_table is not None:
        shift = torch.tensor(is_other, device=call.device) * call.key.shape[0]
        found["page_table"] = call.page_table[index] + shift[:, None].to(call.page_table.dtype)
    mask = call.attn_mask
    if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
        found["attn_mask"] = concatenated([mask.narrow(0, each, 1) for each in order], 0)
    for name, starts in (("cu_seqlens_q", call.cu_seqlens_q), ("cu_seqlens_k", call.cu_seqlens_k)):
        if starts is not None:
            ends = starts.diff()[index].cumsum(0)
            found[name] = torch.cat([ends.new_zeros(1), ends]).to(starts.dtype)
    if call.seqused_k is not None:
        found["seqused_k"] = call.seqused_k[index]
    return _with_maximums(replace(call.with_tensors(found), output=None))


def alone(call: AttentionCall) -> Iterator[Trial]:
    """Yield some sequences of a batch, each in a call of its own."""
    if len(lengths(call)) > 1:
        for each in _some_sequences(call):
            only = Part(of_sequences(call, [each]))
            yield Trial(f"sequence {each} alone", Part(call, each), only)


def in_company(call: AttentionCall) -> Iterator[Trial]:
    """Yield some sequences in the reversed batch, whose other sequences have other values.

    A single sequence is the first of a batch of 2, and the last of a batch of 8.
    """
    count = len(lengths(call))
    for each in _some_sequences(call):
        batches = [("in the reversed batch", [*range(count)][::-1], count - 1 - each)]
        if count == 1:
            batches = [("in a batch of 2", [0] * 2, 0), ("in a batch of 8", [0] * 8, 7)]
        for place, order, own in batches:
            part = Part(of_sequences(call, order, own), own)
            yield Trial(f"sequence {each} {place}", Part(call, each), part)


def in_chunks(
    call: AttentionCall, chunk: int, refuses: Callable[[AttentionCall], object]
) -> Iterator[Trial]:
    """Yield the longest sequence alone, with each chunk of its queries in turn.

    A causal chunk sees the keys up to its last query, as if the cache had grown that far; other
    chunks see all keys. Yield nothing if one chunk has all queries, or if chunks cannot be
    expressed: for windows that look ahead, or if causal queries have no key on their diagonal.

    Args:
        chunk: number of queries in a chunk.
        refuses: kernel's predicate. A refused chunk gets a mask in place of its causality.
    """
    sizes = lengths(call)
    longest = max(range(len(sizes)), key=lambda each: sizes[each])
    only = call if len(sizes) == 1 else of_sequences(call, [longest])
    q_len, kv_len = sizes[longest]
    right = call.variant.window[1]
    looks_back = call.is_causal or right == 0
    shift = kv_len - q_len if call.variant.bottom_right else 0
    if q_len <= chunk or (not looks_back and call.variant.window != (None, None)):
        return
    if looks_back and not 0 <= shift <= kv_len - q_len:
        return
    for start in range(0, q_len, chunk):
        end = min(start + chunk, q_len)
        part = _chunk(only, start, end, end + shift if looks_back else None)
        place = f"sequence {longest} in a chunk from query {start}"
        if refuses(part) and looks_back and part.tensors().keys() == {"query", "key", "value"}:
            masked = _with_mask(part)
            if not refuses(masked):
                part, place = masked, f"{place} with a mask in place of causality"
        yield Trial(place, Part(only, 0, slice(start, end)), Part(part))


def _some_sequences(call: AttentionCall) -> list[int]:
    """Return the first, last and longest of the sequences that have queries, without duplicates."""
    sizes = lengths(call)
    full = [each for each, (queries, _) in enumerate(sizes) if queries]
    if not full:
        return []
    return sorted({full[0], full[-1], max(full, key=lambda each: sizes[each])})


def _chunk(call: AttentionCall, start: int, end: int, keys: int | None) -> AttentionCall:
    """Return the call of one sequence with the queries from `start` up to `end`.

    Args:
        keys: number of keys, the last one on the diagonal of the last query; None for all keys.
    """
    found = {"query": _narrow(call.query, 2, end - start, start)}
    mask, variant = call.attn_mask, call.variant
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        mask = found["attn_mask"] = _narrow(mask, mask.ndim - 2, end - start, start)
    if call.cu_seqlens_q is not None:
        found["cu_seqlens_q"] = call.cu_seqlens_q.new_tensor([0, end - start])
    if keys is not None:
        variant = replace(variant, bottom_right=True)
        if call.seqused_k is not None:
            found["seqused_k"] = torch.full_like(call.seqused_k, keys)
        else:
            found |= {"key": _narrow(call.key, 2, keys), "value": _narrow(call.value, 2, keys)}
            if call.value_is_in_key:
                found["value"] = found["key"][..., : call.value.shape[-1]]
            if mask is not None and mask.shape[-1] > 1:
                found["attn_mask"] = _narrow(mask, mask.ndim - 1, keys)
            if call.cu_seqlens_k is not None:
                found["cu_seqlens_k"] = call.cu_seqlens_k.new_tensor([0, keys])
    return _with_maximums(replace(call.with_tensors(found), variant=variant))


def _with_mask(call: AttentionCall) -> AttentionCall:
    """Return the call with a mask (1, 1, Sq, Sk) in place of causality and window."""
    first, end = call.key_ranges
    keys = torch.arange(call.shape.kv_len, device=call.device)
    mask = (first[..., None] <= keys) & (keys < end[..., None])
    variant = replace(call.variant, bottom_right=False, window=(None, None))
    return replace(call, attn_mask=mask[:, None], is_causal=False, variant=variant)


def _with_maximums(call: AttentionCall) -> AttentionCall:
    """Return the call with its own maximum lengths, if it has such options."""
    longest = zip(("max_seqlen_q", "max_seqlen_k"), zip(*lengths(call), strict=True), strict=True)
    found = {name: max(each) for name, each in longest if getattr(call.variant, name) is not None}
    return replace(call, variant=replace(call.variant, **found)) if found else call


def _joined(
    tensor: Tensor, starts: Tensor | None, order: Sequence[int], is_other: Sequence[bool]
) -> Tensor:
    """Concatenate sequences of a tensor, some of them with other values."""
    parts = [_sequence(tensor, starts, each) for each in order]
    changed = [
        _other_values(part) if other else part for part, other in zip(parts, is_other, strict=True)
    ]
    return concatenated(changed, 0 if starts is None else 2)


def _sequence(tensor: Tensor, starts: Tensor | None, index: int) -> Tensor:
    """Return a view of one sequence of a query, key, value or output."""
    if starts is None:
        return tensor.narrow(0, index, 1)
    first, end = starts[index : index + 2].tolist()
    return tensor.narrow(2, first, end - first)


def _narrow(tensor: Tensor, dim: int, count: int, start: int = 0) -> Tensor:
    return concatenated([tensor.narrow(dim, start, count)], dim)


def _other_values(tensor: Tensor) -> Tensor:
    return mapped(tensor, lambda values: -2 * values)
