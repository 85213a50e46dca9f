"""Operands of both quantised kernels, the portable kernel and the Hopper kernel."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from attention_kernels.quantised.quantise import QuantisedKeyValue


def describable(tensor: Tensor) -> Tensor:
    """Return a query or value, or a copy if a tensor descriptor cannot describe the tensor."""
    if is_describable(tensor):
        return tensor
    step = 16 // tensor.element_size()
    copy = tensor.new_empty((*tensor.shape[:-1], -(-tensor.shape[-1] // step) * step))
    return copy[..., : tensor.shape[-1]].copy_(tensor)


def is_describable(tensor: Tensor) -> bool:
    """Return whether a tensor descriptor can describe a tensor in place.

    The last stride must be 1. The address and the other strides must be positive multiples of 16
    bytes.
    """
    fits = _are_describable(tensor.shape, tensor.stride(), tensor.element_size())
    return fits and tensor.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=1024)
def _are_describable(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    step = 16 // itemsize
    others = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    aligned = all(stride > 0 and stride % step == 0 for stride in others[:-1])
    return strides[-1] == 1 and sizes[-1] > 1 and aligned


def strides_of(tensor: Tensor) -> list[int]:
    """Return strides that a tensor descriptor accepts: some strides of dimensions of size 1 are
    replaced."""
    strides = [
        stride if size > 1 else 64
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return [*strides, 1]


def numbers_of(
    query: Tensor,
    quantised: QuantisedKeyValue,
    factor: float,
    cap: float | None,
    in_tensor_cores: bool,
) -> dict[str, Any]:
    """Return the numeric arguments of a call, by the kernels' names for them.

    Args:
        factor, cap: result of `online_softmax.base_2`.
        in_tensor_cores: whether the tensor cores sum FP8 products over all blocks.
    """
    _, q_heads, q_len, _ = query.shape
    return {
        "q_heads": q_heads,
        "q_len": q_len if quantised.lengths is None else quantised.lengths.longest_query,
        "kv_len": quantised.kv_len,
        "groups": quantised.key_scale.shape[2],
        "factor": factor,
        "cap": cap,
        "IN_TENSOR_CORES": in_tensor_cores,
    }
