"""Joins the parts of one call from the ranks of a distributed model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import PLAIN
from capture.call.per_head import PER_HEAD, SCALES
from capture.call.strides import concatenated

_HEADS, _QUERIES = 1, 2
"""Dimensions of heads and of queries in a query tensor."""
_KEYS = ("key", "value")
_OF_KEY_HEADS = (*_KEYS, *SCALES.values())
_SAME_ON_ALL = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")


class JoinError(ValueError):
    """The parts do not belong to one call; the message states the reason."""


def join(parts: Sequence[AttentionCall], split: str) -> AttentionCall:
    """Return the whole call without gradients, with the origin of the first part.

    Tensors are dense, with the dimension order of the first part. If there are fewer key/value
    heads than ranks, several ranks hold the same head, which is joined only once.

    Args:
        parts: parts in order; their queries (B, Hq, Sq, D) differ in Hq (`heads`) or Sq
            (`queries`).
        split: one of `capture.call.splits.SPLITS`.

    Raises:
        JoinError: the parts do not fit together.
    """
    # The gradient of keys that several ranks use is a sum over the ranks.
    parts = [part.without_gradients() for part in parts]
    first = parts[0]
    for part in parts[1:]:
        _check_alike(first, part)
    whole = first.with_tensors(_by_heads(parts) if split == "heads" else _by_queries(parts))
    is_grouped = whole.shape.q_heads != whole.shape.kv_heads
    return replace(whole, enable_gqa=any(part.enable_gqa for part in parts) or is_grouped)


def _check_alike(first: AttentionCall, other: AttentionCall) -> None:
    """Raise JoinError if two parts differ in their options, or in which tensors they have."""
    for name in ("is_causal", "scale", "dropout_p", "variant"):
        if getattr(first, name) != getattr(other, name):
            raise JoinError(f"the ranks' calls differ in {name}")
    ours, theirs = first.tensors(), other.tensors()
    if ours.keys() != theirs.keys():
        raise JoinError(f"only some ranks have {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
    for name in ours:
        if ours[name].dtype != theirs[name].dtype:
            raise JoinError(f"the ranks' calls differ in the dtype of {name}")


def _by_heads(parts: Sequence[AttentionCall]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in parts[0].tensors():
        if name in _SAME_ON_ALL:
            tensors[name] = _the_same(parts, name)
        elif name == "attn_mask":
            tensors[name] = _joined_mask(parts, _HEADS)
        else:
            holders = _holders_of_keys(parts) if name in _OF_KEY_HEADS else parts
            tensors[name] = _joined(holders, name, 0 if name in PER_HEAD else _HEADS)
    if all(part.value_is_in_key for part in parts):
        tensors["value"] = tensors["key"][..., : parts[0].shape.v_head_dim]
    return tensors


def _by_queries(parts: Sequence[AttentionCall]) -> dict[str, Tensor]:
    first = parts[0]
    if first.is_causal or first.variant != PLAIN or first.features:
        raise JoinError(
            "is_causal, a window or lengths refer to the queries of a part, not of the whole call"
        )
    tensors: dict[str, Tensor] = {}
    for name in first.tensors():
        if name in _KEYS:
            tensors[name] = _the_same(parts, name)
        elif name == "attn_mask":
            tensors[name] = _joined_mask(parts, _QUERIES)
        else:
            tensors[name] = _joined(parts, name, _QUERIES)
    return tensors


def _holders_of_keys(parts: Sequence[AttentionCall]) -> Sequence[AttentionCall]:
    """Return the parts whose key/value heads together are all key/value heads of the whole call.

    If there are fewer key/value heads than ranks, neighbouring ranks hold the same head.
    """
    runs: list[list[AttentionCall]] = []
    for part in parts:
        holds_the_same = (
            runs
            and part.key.shape[1] == 1
            and all(_is_same(getattr(part, name), getattr(runs[-1][0], name)) for name in _KEYS)
        )
        if holds_the_same:
            runs[-1].append(part)
        else:
            runs.append([part])
    for grouped in (runs, [[part] for part in parts]):
        ratios = {
            sum(part.shape.q_heads for part in run) / run[0].shape.kv_heads for run in grouped
        }
        if len(ratios) == 1:
            return [run[0] for run in grouped]
    raise JoinError("its key/value heads would serve different numbers of query heads")


def _joined(parts: Sequence[AttentionCall], name: str, dim: int) -> Tensor:
    tensors = [getattr(part, name) for part in parts]
    sizes = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(sizes) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors[:2])
        raise JoinError(f"{name} of shapes {shapes} do not fit together")
    return concatenated(tensors, dim)


def _joined_mask(parts: Sequence[AttentionCall], dim: int) -> Tensor:
    """Return the mask of the whole call: the common mask of all parts, or their joined masks."""
    masks = [part.attn_mask for part in parts]
    is_for_all = all(mask is not None and mask.shape[dim] == 1 for mask in masks)
    if is_for_all and all(_is_same(masks[0], mask) for mask in masks):
        return _the_same(parts, "attn_mask")
    for part, mask in zip(parts, masks, strict=True):
        if mask is not None and mask.shape[dim] != part.query.shape[dim]:
            raise JoinError("only some ranks have a mask for all heads or queries")
    return _joined(parts, "attn_mask", dim)


def _the_same(parts: Sequence[AttentionCall], name: str) -> Tensor:
    tensor: Tensor = getattr(parts[0], name)
    if not all(_is_same(tensor, getattr(part, name)) for part in parts):
        raise JoinError(f"the ranks' calls differ in the values of {name}")
    return tensor


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same bits, so that a NaN equals itself."""
    if a is None or b is None or a.shape != b.shape:
        return a is b
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
