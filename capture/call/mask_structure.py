"""Recognises the structure of dense masks: causal, window, padding, packed sequences, no mask.

Models pass such masks to SDPA element by element, because SDPA has no argument for most structures.
A kernel that supports a structure need not read the mask or the masked keys. With each of these
structures, every query sees one contiguous range of keys. The mask is read once, in blocks, to find
these ranges. All further steps need only two numbers per query. Options are guessed from single
rows, and accepted if they give every query exactly its range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import (
    AttentionVariant,
    KeyRanges,
    Window,
    key_ranges,
    query_positions,
)
from capture.call.strides import narrow_expanded

BLOCK_ELEMENTS = 2**20
"""Maximum number of mask elements in a block, unless the row of a single query is longer."""

NO_MASK = "no mask"
"""Description of a mask under which every key is visible."""


@dataclass(frozen=True, eq=False)
class MaskStructure:
    """Structure of a mask, as options of a call; by default all keys are visible."""

    is_causal: bool = False
    bottom_right: bool = False
    window: Window = (None, None)
    seqused_k: Tensor | None = None
    """(1,), (B,) or, packed, (N,) int32: number of valid keys of each sequence."""
    cu_seqlens_q: Tensor | None = None
    """(N + 1,) int32: first query of each sequence, then the total."""
    cu_seqlens_k: Tensor | None = None
    starts_k: Tensor | None = None
    """(1,) or (B,) int64: first valid key after left padding."""

    def __str__(self) -> str:
        """Format as `causal, padding`, `window 1023/0`, `3 packed sequences, causal`, `no mask`."""
        left, right = ("∞" if side is None else str(side) for side in self.window)
        shape = "causal" if self.is_causal else ""
        if self.window != (None, None):
            shape = f"window {left}/{right}"
        packed = self.cu_seqlens_q
        parts = [
            "" if packed is None else f"{packed.shape[0] - 1} packed sequences",
            f"bottom-right {shape}" if shape and self.bottom_right else shape,
            "left padding" if self.starts_k is not None else "",
            "padding" if self.seqused_k is not None else "",
        ]
        return ", ".join(filter(None, parts)) or NO_MASK

    def restated(self, call: AttentionCall) -> AttentionCall | None:
        """Return the call that had this mask, with the mask replaced by equivalent options.

        The output is the same, except that a NaN in a masked key no longer reaches the output. The
        other tensors are the same objects. The result is None for structures without an equivalent
        option: left padding, and packed sequences in a batch of several.
        """
        batch = call.shape.batch
        if self.starts_k is not None or (self.cu_seqlens_q is not None and batch > 1):
            return None
        used = self.seqused_k
        if used is not None and self.cu_seqlens_q is None:
            used = used.expand(batch).contiguous()
        return replace(
            call,
            attn_mask=None,
            is_causal=self.is_causal,
            variant=replace(
                call.variant,
                bottom_right=self.bottom_right,
                window=self.window,
                max_seqlen_q=_longest(self.cu_seqlens_q),
                max_seqlen_k=_longest(self.cu_seqlens_k),
            ),
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_k=used,
        )

    def key_ranges(self, q_len: int, kv_len: int, device: torch.device) -> KeyRanges:
        """Return the keys that each query sees with this structure."""
        first, end = key_ranges(
            q_len,
            kv_len,
            device,
            is_causal=self.is_causal,
            variant=AttentionVariant(self.bottom_right, self.window),
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_k=self.seqused_k,
        )
        return KeyRanges(
            first if self.starts_k is None else first.maximum(self.starts_k[:, None]), end
        )


def structure_of(call: AttentionCall) -> MaskStructure | None:
    """Return the combined structure of a call's mask, causality and window.

    The result is None without a mask, for a mask of another structure, and for a call that also has
    sequence lengths.
    """
    if call.attn_mask is None or call.cu_seqlens_q is not None or call.seqused_k is not None:
        return None
    return found_in(call.attn_mask, call.key_ranges, call.shape.q_len, call.shape.kv_len)


def found_in(attn_mask: Tensor, within: KeyRanges, q_len: int, kv_len: int) -> MaskStructure | None:
    """Return the structure of a mask that broadcasts to (B, Hq, Sq, Sk); None if it has none.

    The mask must be bool, or contain only 0, -inf and the lowest value of its dtype. If the lowest
    value masks every key of a query, the result is None: SDPA then returns the mean of all values,
    which no option expresses.

    Args:
        within: keys that are visible with the call's own causality and window.
    """
    if not (q_len and kv_len):
        return None
    seen = _seen(attn_mask, within, kv_len)
    if seen is None:
        return None
    found = [
        fitted
        for structure in _candidates(seen, q_len, kv_len)
        if (fitted := _fitted(structure, seen, q_len, kv_len)) is not None
    ]
    return min(found, key=_oddness, default=None)


def shows_exactly(attn_mask: Tensor, ranges: KeyRanges, kv_len: int) -> bool:
    """Return whether a mask alone shows every query, in each head, exactly a range of keys.

    Args:
        attn_mask: mask that broadcasts to (B, Hq, Sq, Sk).
        ranges: keys to compare with.
        kv_len: number of keys, Sk.
    """
    all_keys = KeyRanges(torch.zeros_like(ranges.first), torch.full_like(ranges.end, kv_len))
    seen = _seen(attn_mask, all_keys, kv_len)
    return seen is not None and _same(seen, ranges)


def _oddness(structure: MaskStructure) -> tuple[bool, ...]:
    """Return a sort key: options that are common and widely supported come first."""
    return (
        structure.cu_seqlens_q is not None,
        structure.window[1] not in (0, None),
        structure.starts_k is not None,
        structure.seqused_k is not None,
        structure.bottom_right,
    )


def _seen(attn_mask: Tensor, within: KeyRanges, kv_len: int) -> KeyRanges | None:
    """Return the keys that each query sees; None if a range has gaps, or heads differ."""
    mask = narrow_expanded(attn_mask.detach())
    mask = mask[(None,) * (4 - mask.ndim)]
    batch, heads, _, keys = mask.shape
    per_block = max(1, BLOCK_ELEMENTS // (batch * heads * keys))
    blocks, has_lowest = [], False
    for block in mask.split(per_block, dim=2):
        if block.dtype == torch.bool:
            visible = block
        elif block.dtype.is_floating_point and block.dtype.itemsize > 1:
            lowest = block == torch.finfo(block.dtype).min
            visible = block == 0
            if not bool((visible | lowest | (block == -torch.inf)).all()):
                return None
            has_lowest = has_lowest or bool(lowest.any())
        else:
            return None
        span = _unbroken(visible)
        if span is None or not bool((span == span[:, :, :1]).all()):
            return None
        blocks.append(span[:, :, 0])
    first, end = torch.cat(blocks, dim=2) * (kv_len // keys)
    first, end = torch.maximum(first, within.first), torch.minimum(end, within.end)
    is_empty = end <= first
    if has_lowest and bool(is_empty.any()):
        return None
    return KeyRanges(first, torch.where(is_empty, first, end))


def _unbroken(visible: Tensor) -> Tensor | None:
    """Return the start and end of the visible keys, (2, B, H, rows); None if a row has gaps.

    Args:
        visible: (B, H, rows, keys) bool.
    """
    keys = visible.shape[3]
    starts_visible, ends_visible = visible[..., 0].flatten(), visible[..., -1].flatten()
    *row, key = (visible[..., 1:] ^ visible[..., :-1]).nonzero(as_tuple=True)
    flat = (row[0] * visible.shape[1] + row[1]) * visible.shape[2] + row[2]
    changes = torch.bincount(flat, minlength=starts_visible.numel())
    if bool((changes + starts_visible.int() + ends_visible.int() > 2).any()):
        return None
    # Visibility changes at the first visible key, and at the first masked key after it.
    lowest = torch.full_like(changes, keys).scatter_reduce(0, flat, key + 1, "amin")
    highest = torch.zeros_like(changes).scatter_reduce(0, flat, key + 1, "amax")
    first = lowest.masked_fill(starts_visible, 0)
    end = highest.masked_fill(ends_visible, keys)
    return torch.stack([first, end]).view(2, *visible.shape[:3])


def _candidates(seen: KeyRanges, q_len: int, kv_len: int) -> Iterator[MaskStructure]:
    """Yield a structure for each length and alignment to try, without causality or a window."""
    first, end = seen
    is_empty = end <= first
    used = end.masked_fill(is_empty, 0).amax(dim=1).to(torch.int32)
    starts = first.masked_fill(is_empty, kv_len).amin(dim=1) % kv_len
    plain = [MaskStructure()]
    if bool(used.ne(kv_len).any()):
        plain.append(MaskStructure(seqused_k=used))
    if bool(starts.any()):
        plain += [replace(each, starts_k=starts) for each in plain]
    if first.shape[0] == 1 and (packed := _packed(first[0], end[0], kv_len)) is not None:
        plain += packed
    for structure in plain:
        yield structure
        yield replace(structure, bottom_right=True)


def _packed(first: Tensor, end: Tensor, kv_len: int) -> list[MaskStructure] | None:
    """Return possible packed sequences; a query that sees only later keys starts a sequence."""
    is_empty = end <= first
    reached = end.masked_fill(is_empty, 0).cummax(dim=0).values
    begins = torch.where(is_empty, reached, first)[1:] >= reached[:-1]
    begins &= ~(is_empty[1:] & is_empty[:-1])
    rows = begins.nonzero()[:, 0] + 1
    if not rows.numel():
        return None
    keys = torch.where(is_empty, reached, first)[rows]
    starts_q, starts_k = (
        torch.cat([begin.new_tensor([0]), begin, begin.new_tensor([total])]).to(torch.int32)
        for begin, total in ((rows, first.shape[0]), (keys, kv_len))
    )
    structure = MaskStructure(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    used = (reached[starts_q[1:].long() - 1] - starts_k[:-1]).to(torch.int32)
    if bool((used == starts_k.diff()).all()):
        return [structure]
    return [structure, replace(structure, seqused_k=used)]


def _fitted(
    structure: MaskStructure, seen: KeyRanges, q_len: int, kv_len: int
) -> MaskStructure | None:
    """Return the structure with the causality and window that fit the visible keys, or None."""
    device = seen.first.device
    begin, length, diagonal = query_positions(
        q_len,
        kv_len,
        device,
        bottom_right=structure.bottom_right,
        cu_seqlens_q=structure.cu_seqlens_q,
        cu_seqlens_k=structure.cu_seqlens_k,
        seqused_k=structure.seqused_k,
    )
    unrestricted, diagonal = structure.key_ranges(q_len, kv_len, device), begin + diagonal
    sees = seen.end > seen.first
    left = _one_of(diagonal - seen.first, sees & (seen.first > unrestricted.first))
    right = _one_of(seen.end - 1 - diagonal, sees & (seen.end < begin + length))
    if (left or 0) < 0 or (right or 0) < 0:
        return None
    rights: tuple[int | None, ...] = (right,)
    if right is None:  # a window is usually causal, even if no row reveals its right end
        rights = (None, 0) if left is None else (0, None)
    for to_the_right in rights:
        is_causal = to_the_right == 0
        window = (left, to_the_right)
        if is_causal and left is None:
            window = (None, None)
        fitted = replace(structure, is_causal=is_causal, window=window)
        if _same(fitted.key_ranges(q_len, kv_len, device), seen):
            return fitted
    return None


def _one_of(distances: Tensor, where: Tensor) -> int | None:
    """Return the first distance for which `where` is true; None if there is none."""
    distances, where = torch.broadcast_tensors(distances, where)
    place = where.flatten().to(torch.uint8).argmax()
    return int(distances.flatten()[place]) if bool(where.flatten()[place]) else None


def _same(one: KeyRanges, other: KeyRanges) -> bool:
    """Return whether every query sees the same keys in both ranges."""
    neither = (one.end <= one.first) & (other.end <= other.first)
    alike = (one.first == other.first) & (one.end == other.end)
    return bool((neither | alike).all())


def _longest(starts: Tensor | None) -> int | None:
    return None if starts is None else int(starts.diff().max())
