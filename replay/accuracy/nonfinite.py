"""NaN and infinity in a call's inputs, the queries that see them, and overflow of scores.

A key or value is hidden from a query if the mask, causality, the window or the sequences exclude
it. A query that sees no key is hidden itself. A kernel that multiplies a hidden NaN by zero returns
NaN, and a kernel that skips hidden keys returns the exact result. Neither is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import KeyRanges
from capture.call.block_mask import is_block_mask, rows_of
from capture.call.nonfinite import counted_nonfinite, nonfinite_counts

BLOCK = 2**20
"""Number of (query, key) pairs held at a time."""


@dataclass(frozen=True)
class NonFinite:
    """NaN and infinite elements of a call's inputs."""

    sentence: str
    """Count for each tensor, such as `key 128 NaN (hidden), value 2 infinite (1 of 2 visible)`."""
    exposed: Tensor = field(repr=False)
    """(B, Hq, Sq) bool: the rows from which such an element is hidden, although their head has
    it."""
    visible: int
    """Number of such elements in keys that a query sees, or in queries that see a key."""


class VisibleBlock(NamedTuple):
    """Visible keys of some queries, in the query heads that share a key head."""

    batch: int
    kv_head: int
    heads: slice
    rows: slice
    visible: Tensor
    """(H or 1, rows, Sk) bool."""


def nonfinite_inputs(call: AttentionCall) -> NonFinite | None:
    """Find the NaN and infinite elements of a call; None if there are none.

    In a mask or among sinks, -inf is an ordinary value.
    """
    names = ("query", "key", "value", "attn_mask", "sinks")
    given = {name: tensor for name, tensor in call.tensors().items() if name in names}
    if not any(sum(nonfinite_counts(tensor, name)) for name, tensor in given.items()):
        return None
    whole = call.without_pages()
    odd = {name: _odd_rows(getattr(whole, name)) for name in ("query", "key", "value")}
    seen = {name: torch.zeros_like(rows) for name, rows in odd.items()}
    exposed = torch.zeros(whole.query.shape[:3], dtype=torch.bool, device=call.device)
    for batch, kv_head, heads, rows, visible in visible_blocks(whole):
        sees_some = visible.any(-1)
        seen["query"][batch, heads, rows] = sees_some
        exposed[batch, heads, rows] |= odd["query"][batch, heads, rows] & ~sees_some
        for name in ("key", "value"):
            columns = odd[name][batch, kv_head]
            seen[name][batch, kv_head] |= visible.any(0).any(0)
            exposed[batch, heads, rows] |= ~visible[..., columns].all(-1)
    parts, total_visible = [], 0
    for name, tensor in given.items():
        nan, infinite = nonfinite_counts(tensor, name)
        if not nan + infinite:
            continue
        shown = nan + infinite
        if name in seen:
            read = getattr(whole, name)[seen[name]]
            # Sequences may share a page, whose elements are then counted several times.
            shown = min(shown, sum(nonfinite_counts(read, name)))
            if call.page_table is not None and shown < nan + infinite:
                exposed |= True  # the rest of a page is read together with it
        words = {0: "hidden", nan + infinite: "visible"}
        place = words.get(shown, f"{shown:,} visible")
        parts.append(f"{name} {counted_nonfinite(nan, infinite)} ({place})")
        total_visible += shown
    return NonFinite(", ".join(parts), exposed, total_visible)


def visible_blocks(call: AttentionCall) -> Iterator[VisibleBlock]:
    """Yield the visible keys of every row, in blocks; the call has no page table."""
    shape, span = call.shape, call.key_ranges
    group = shape.q_heads // shape.kv_heads
    step = max(1, BLOCK // max(1, group * shape.kv_len))
    for batch in range(shape.batch):
        for kv_head in range(shape.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for first in range(0, shape.q_len, step):
                rows = slice(first, min(first + step, shape.q_len))
                seen = visible_keys(call, span, batch, heads, rows, slice(0, shape.kv_len))
                yield VisibleBlock(batch, kv_head, heads, rows, seen)


def visible_keys(
    call: AttentionCall,
    span: KeyRanges | None,
    batch: int,
    heads: slice,
    rows: slice,
    keys: slice,
) -> Tensor:
    """Return the keys that each query sees: bool (H or 1, rows, keys).

    The lowest value of a mask's dtype hides a key, as -inf does, from queries that see another key.
    """
    count = rows.stop - rows.start
    visible = torch.ones(1, count, keys.stop - keys.start, dtype=torch.bool, device=call.device)
    if span is not None:
        position = torch.arange(keys.start, keys.stop, device=call.device)
        firsts, ends = (edges[rows, None] for edges in span.of(batch))
        visible = ((position >= firsts) & (position < ends))[None]
    if call.attn_mask is None:
        return visible
    mask = mask_block(call.attn_mask, batch, heads, rows, keys)
    if mask.dtype == torch.bool:
        return visible & mask
    preferred = visible & ~(mask <= torch.finfo(mask.dtype).min)  # a NaN of the mask is visible
    return torch.where(preferred.any(-1, keepdim=True), preferred, visible & (mask != -math.inf))


def mask_block(mask: Tensor, batch: int, heads: slice, rows: slice, keys: slice) -> Tensor:
    """Return the part of a mask for these rows and keys; dimensions of size 1 broadcast."""
    if is_block_mask(mask):
        queries = torch.arange(rows.start, rows.stop, device=mask.device)
        mask = mask if mask.shape[0] == 1 else mask[batch : batch + 1]
        mask = mask if mask.shape[1] == 1 else mask[:, heads]
        return rows_of(mask, queries, keys.stop)[0, ..., keys.start :]
    mask = mask[(None,) * (4 - mask.ndim)]
    wanted = (slice(batch, batch + 1), heads, rows, keys)
    parts = (
        slice(None) if size == 1 else part for size, part in zip(mask.shape, wanted, strict=True)
    )
    return mask[tuple(parts)].squeeze(0)


def largest_scores(call: AttentionCall) -> Tensor:
    """Return the largest |q·k| among the keys that each row sees: (B, Hq, Sq) in float32."""
    call = call.without_pages().without_scales()
    largest = torch.zeros(call.query.shape[:3], device=call.device)
    if not call.shape.kv_len:
        return largest
    for batch, kv_head, heads, rows, visible in visible_blocks(call):
        key = call.key[batch, kv_head].float()
        scores = (call.query[batch, heads, rows].float() @ key.mT).abs_()
        largest[batch, heads, rows] = scores.masked_fill_(~visible, 0.0).amax(-1)
    return largest


def _odd_rows(tensor: Tensor) -> Tensor:
    return ~(tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all(-1)
