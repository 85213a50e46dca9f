"""Reduces a call to some of its heads, such as `0,2-3`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import numbers_of_heads
from capture.call.strides import picked


def kv_heads_of(heads: Sequence[int], q_heads: int, kv_heads: int) -> list[int] | None:
    """Return the key/value heads that these query heads attend to.

    The result is None if the call lacks one of the query heads, or if the key/value heads would
    serve different numbers of query heads, which grouped-query attention cannot express.
    """
    if heads[-1] >= q_heads:
        return None
    group = q_heads // kv_heads
    served = Counter(head // group for head in heads)
    return list(served) if len(set(served.values())) == 1 else None


def pick(call: AttentionCall, heads: Sequence[int], kv_heads: Sequence[int]) -> AttentionCall:
    """Return a call with only these heads; its tensors are dense and keep their dimension order."""
    mask, key = call.attn_mask, _picked(call.key, kv_heads)
    value = key[..., : call.value.shape[-1]] if call.value_is_in_key else None
    return replace(
        call,
        query=_picked(call.query, heads),
        key=key,
        value=_picked(call.value, kv_heads) if value is None else value,
        attn_mask=mask if mask is None or mask.shape[1] == 1 else _picked(mask, heads),
        output=None if call.output is None else _picked(call.output, heads),
        **numbers_of_heads(call.tensors(), list(heads), list(kv_heads)),
    )


def picked_gradient(
    name: str, gradient: Tensor, q_heads: int, heads: Sequence[int], kv_heads: Sequence[int]
) -> Tensor | None:
    """Return the part of a gradient for some heads; None if it is a sum over other heads too.

    Args:
        name: field of the gradient's tensor.
        q_heads: number of query heads of the whole call.
    """
    if name == "sinks":
        return gradient[list(heads)]
    if name in ("key", "value"):
        is_sum_over_others = len(heads) * gradient.shape[1] < q_heads * len(kv_heads)
        return None if is_sum_over_others else _picked(gradient, kv_heads)
    if gradient.shape[1] < q_heads:  # a mask for all heads
        return gradient if len(heads) == q_heads else None
    return _picked(gradient, heads)


def _picked(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    if tensor.stride(1) == 0:  # all heads share the same memory
        return tensor[:, : len(heads)]
    return picked(tensor, 1, torch.tensor(heads, device=tensor.device))
