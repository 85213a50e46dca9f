"""Operands as both quantised kernels take them, the portable one and Hopper's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replay.kernels.triton.launch import named
from replay.kernels.triton.quantise import QuantisedKeyValue


def describable(value: Tensor) -> Tensor:
    """`value`, or a copy where a tensor descriptor cannot describe its strides.

    The last must be 1, the others positive multiples of 16 bytes, and so must the address be.
    """
    step = 16 // value.element_size()
    others = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    aligned = all(stride > 0 and stride % step == 0 for stride in others[:-1])
    if value.stride(-1) == 1 and value.shape[-1] > 1 and aligned and value.data_ptr() % 16 == 0:
        return value
    copy = value.new_empty((*value.shape[:-1], -(-value.shape[-1] // step) * step))
    return copy[..., : value.shape[-1]].copy_(value)


def value_strides(value: Tensor) -> list[int]:
    """Strides for a tensor descriptor: a dimension of size 1 may have any, and not all will do."""
    strides = [
        stride if size > 1 else 64
        for size, stride in zip(value.shape[:3], value.stride()[:3], strict=True)
    ]
    return [*strides, 1]


def numbers_of(
    query: Tensor,
    quantised: QuantisedKeyValue,
    is_causal: bool,
    factor: float,
    in_tensor_cores: bool,
) -> dict[str, Any]:
    """What a call's tensors say, as arguments by the kernels' names for them.

    Args:
        factor: softmax's scale · log2 e.
        in_tensor_cores: whether FP8 products are summed there from the first block to the last.
    """
    _, q_heads, q_len, head_dim = query.shape
    return named("stride_", "bhsd", query.stride()) | {
        "q_heads": q_heads,
        "kv_heads": quantised.key.shape[1],
        "q_len": q_len,
        "kv_len": quantised.kv_len,
        "groups": quantised.key_scale.shape[2],
        "factor": factor,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": quantised.v_head_dim,
        "IS_CAUSAL": is_causal,
        "IN_TENSOR_CORES": in_tensor_cores,
    }
