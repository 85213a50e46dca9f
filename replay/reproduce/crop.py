"""Parts of a call: some of its sequences, heads, queries or keys.

Leaving out sequences, whole groups of heads or queries does not change the output of the others, so
the recorded output is cropped too. Leaving out keys that some query sees changes the output:
such a call is derived from the recorded call, and its output must be recomputed.

Parts are views, so that they keep the model's strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import numbers_of_heads
from capture.call.strides import narrow_expanded
from capture.recording.paging import with_pages_read
from capture.storage.header import CallHeader, stored_tensors


@dataclass(frozen=True)
class Axis:
    """Dimension along which parts of a call can be left out."""

    name: str
    """Plural name, as in `queries 5-7`."""
    length: Callable[[AttentionCall], int]
    take: Callable[[AttentionCall, int, int], AttentionCall | None]
    """Function from a call, a first index and an end index to the part; the end is excluded.

    It returns None if the call's options cannot express the part, or if the part's output would
    differ.
    """
    is_exact: bool = True
    """True if the remaining outputs equal the recorded ones; otherwise the part has no output."""


def _sequences(call: AttentionCall) -> int:
    return call.shape.batch if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1


def _take_sequences(call: AttentionCall, first: int, end: int) -> AttentionCall:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    part = replace(
        call,
        seqused_k=None if call.seqused_k is None else call.seqused_k[first:end],
        page_table=None if call.page_table is None else call.page_table[first:end],
    )
    if starts_q is None:
        part = _narrowed(part, 0, first, end, "query", "output", "attn_mask")
        if call.page_table is not None:
            return with_pages_read(part)
        return _narrowed(part, 0, first, end, "key", "value")
    variant = call.variant
    lengths_q = starts_q[first : end + 1]
    part = _narrowed(part, 2, int(lengths_q[0]), int(lengths_q[-1]), "query", "output", "attn_mask")
    part = replace(part, cu_seqlens_q=lengths_q - lengths_q[0])
    if variant.max_seqlen_q is not None:
        variant = replace(variant, max_seqlen_q=int(lengths_q.diff().max()))
    if starts_k is not None:
        lengths_k = starts_k[first : end + 1]
        part = _narrowed(part, 2, int(lengths_k[0]), int(lengths_k[-1]), "key", "value")
        part = _mask_columns(part, int(lengths_k[0]), int(lengths_k[-1]))
        part = replace(part, cu_seqlens_k=lengths_k - lengths_k[0])
        if variant.max_seqlen_k is not None:
            variant = replace(variant, max_seqlen_k=int(lengths_k.diff().max()))
    part = replace(part, variant=variant)
    return part if part.page_table is None else with_pages_read(part)


def _take_groups(call: AttentionCall, first: int, end: int) -> AttentionCall:
    """Return some key heads, each with all query heads that share it."""
    group = call.shape.q_heads // call.shape.kv_heads
    heads = first * group, end * group
    part = _narrowed(call, 1, *heads, "query", "output", "attn_mask")
    part = part.with_tensors(numbers_of_heads(call.tensors(), slice(*heads), slice(first, end)))
    return _narrowed(part, 1, first, end, "key", "value")


def _queries(call: AttentionCall) -> int:
    """Return the number of queries that can be cropped; packed sequences keep all queries."""
    return 1 if call.cu_seqlens_q is not None else call.shape.q_len


def _take_queries(call: AttentionCall, first: int, end: int) -> AttentionCall | None:
    """Return a range of queries, without the keys that no query in the range sees.

    If a diagonal limits the visible keys, queries at later positions need a bottom-right diagonal,
    which pairs the last remaining query with the last remaining key. A single query needs no
    diagonal.
    """
    if call.cu_seqlens_q is not None:
        return call
    part = _narrowed(call, 2, first, end, "query", "output", "attn_mask")
    left, right = call.variant.window
    right = 0 if call.is_causal and right is None else right
    if left is None and right is None:
        return part
    if call.seqused_k is not None:  # each sequence has its own diagonal
        stays = end == call.shape.q_len if call.variant.bottom_right else first == 0
        return part if stays else None
    seen_first, seen_end = (each[0, first:end] for each in call.key_ranges)
    sees = seen_end > seen_first
    if not bool(sees.all()):
        return part if first == 0 and end == call.shape.q_len else None
    keys = 0, int(seen_end.max())
    offset = call.shape.kv_len - call.shape.q_len if call.variant.bottom_right else 0
    if end - first == 1:
        keys = int(seen_first[0]), keys[1]
        plain = replace(part.variant, window=(None, None), bottom_right=False)
        part = replace(part, is_causal=False, variant=plain)
    elif first + offset:
        if keys[1] != end + offset:  # the last query is not paired with the last key
            return None
        part = replace(part, variant=replace(part.variant, bottom_right=True))
    else:
        part = replace(part, variant=replace(part.variant, bottom_right=False))
    dropped = (each[:, :, : keys[0]] for each in (call.key, call.value))
    after = (each[:, :, keys[1] :] for each in (call.key, call.value))
    if not all(bool(each.isfinite().all()) for each in (*dropped, *after)):
        return None  # SDPA passes on the NaN of a masked key
    return _with_keys(part, *keys)


def _keys(call: AttentionCall) -> int:
    """Return the number of keys that can be cropped; packed and paged keys are all kept."""
    is_apart = call.cu_seqlens_q is not None or call.page_table is not None
    return 1 if is_apart else call.shape.kv_len


def _take_keys(call: AttentionCall, first: int, end: int) -> AttentionCall:
    part = _with_keys(call, first, end)
    if part.seqused_k is not None:
        part = replace(part, seqused_k=part.seqused_k.clamp(max=end - first))
    return replace(part, output=None)


def _take_any_queries(call: AttentionCall, first: int, end: int) -> AttentionCall:
    part = _narrowed(call, 2, first, end, "query", "attn_mask")
    return replace(part, output=None)


EXACT = (
    Axis("sequences", _sequences, _take_sequences),
    Axis("key heads", lambda call: call.shape.kv_heads, _take_groups),
    Axis("queries", _queries, _take_queries),
)
"""Dimensions along which parts can be left out without changing the other outputs."""

DERIVED = (
    Axis("keys", _keys, _take_keys, is_exact=False),
    Axis("queries", _queries, _take_any_queries, is_exact=False),
)
"""Dimensions along which parts can be left out if the output is recomputed."""


def left_alone(call: AttentionCall) -> str:
    """Describe the parts that are never cropped, and why; empty if everything may be cropped."""
    if call.cu_seqlens_q is not None:
        return "queries and keys are left as they are within each packed sequence"
    if call.page_table is not None:
        return "keys are left as they are, since they lie in pages"
    return ""


def _with_keys(call: AttentionCall, first: int, end: int) -> AttentionCall:
    return _mask_columns(_narrowed(call, 2, first, end, "key", "value"), first, end)


def _narrowed(call: AttentionCall, dim: int, first: int, end: int, *names: str) -> AttentionCall:
    tensors = call.tensors()
    found = {name: _part(tensors[name], dim, first, end) for name in names if name in tensors}
    return call.with_tensors(found)


def _mask_columns(call: AttentionCall, first: int, end: int) -> AttentionCall:
    return _narrowed(call, 3, first, end, "attn_mask")


def _part(tensor: Tensor, dim: int, first: int, end: int) -> Tensor:
    """Return a view of part of a dimension; a dimension that a mask broadcasts is kept whole."""
    dim -= 4 - tensor.ndim
    if dim < 0 or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, first, end - first)


def storable(call: AttentionCall) -> AttentionCall:
    """Return the call; remove gaps between its rows if they are far larger than its values.

    A single head of a large model keeps the gaps of all other heads, and readers refuse files that
    claim this much memory (`capture.storage.header`).
    """
    header = CallHeader.of(call)
    nbytes = sum(narrow_expanded(each).nbytes for each in stored_tensors(call).values())
    if not header.excess(nbytes):
        return call
    names = ("query", "key", "value", "output")
    found = {name: each.contiguous() for name, each in call.tensors().items() if name in names}
    if call.value_is_in_key:
        found["value"] = found["key"][..., : call.value.shape[-1]]
    return call.with_tensors(found)
