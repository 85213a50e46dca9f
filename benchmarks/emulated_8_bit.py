"""Emulates the rounding of real 8-bit kernels in PyTorch, for machines without such kernels.

    replay --dir captured_inputs --kernels torch-default,benchmarks/emulated_8_bit.py:int8

The kernels are slow, so only their errors are meaningful.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_replay import register_kernel
from capture.call.attention_call import AttentionCall
from replay.accuracy.quantised import to_fp8, to_int8

BLOCK = 64
"""Number of tokens that share a scale in INT8."""


def _no_mask(call: AttentionCall) -> str | None:
    return None if call.attn_mask is None else "takes no mask"


@register_kernel("emulated-int8", unsupported=_no_mask, accuracy_class="quantised")
def int8(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    """SageAttention 1: query and smoothed key in INT8 by blocks; values are not quantised."""
    return scaled_dot_product_attention(*_smooth(query, key), value, *others, **options)


@register_kernel("emulated-sage-fp8", unsupported=_no_mask, accuracy_class="quantised")
def sage_fp8(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    """SageAttention 2: query and smoothed key in INT8, value in e4m3 with a scale per channel."""
    value = to_fp8(value.float(), value.float().abs().amax(2, keepdim=True)).to(value.dtype)
    return scaled_dot_product_attention(*_smooth(query, key), value, *others, **options)


@register_kernel("emulated-fp8", unsupported=_no_mask, accuracy_class="quantised")
def fp8(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    """FlashAttention 3: query, key and value in e4m3, with a scale per head."""
    query, key, value = (
        to_fp8(each.float(), each.float().abs().amax((2, 3), keepdim=True)).to(each.dtype)
        for each in (query, key, value)
    )
    return scaled_dot_product_attention(query, key, value, *others, **options)


def _smooth(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Round to INT8 by blocks, after the mean key was subtracted from all keys."""
    smooth = key.float() - key.float().mean(2, keepdim=True)
    query = _by_block(query.float(), to_int8).to(query.dtype)
    return query, _by_block(smooth, to_int8).to(key.dtype)


def _by_block(tensor: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    parts = tensor.split(BLOCK, dim=2)
    return torch.cat([rounded(each, each.abs().amax((2, 3), keepdim=True)) for each in parts], 2)
