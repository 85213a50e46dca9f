"""Kernels that are wrong in one place, in a user's file that imports a neighbouring module."""

import ctypes
from typing import Any

from factors import WRONG_FACTOR
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_replay import register_kernel


@register_kernel("planted-head", default=False)
def head(q: Tensor, k: Tensor, v: Tensor, /, sm_scale: float, enable_gqa: bool) -> Tensor:
    output = scaled_dot_product_attention(q, k, v, scale=sm_scale, enable_gqa=enable_gqa)
    output[:, 1] *= WRONG_FACTOR
    return output


def crash(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    if key.shape[2] > 16:
        ctypes.string_at(0)
    return scaled_dot_product_attention(query, key, value, *others, **options)


def right(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    return scaled_dot_product_attention(query, key, value, *others, **options)
