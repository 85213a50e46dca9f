"""Checks of a call's arguments. `attention`, FlashAttention's functions and those of block-sparse
attention check the types of tensors. Every function checks shapes and `options` when it plans a
call; kernels themselves check nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_kernels.options import PLAIN, AttentionOptions

Sizes = tuple[int, ...]


def check_types(tensors: dict[str, Any], options: Any = PLAIN, **optional: Any) -> None:
    """Check the types of the arguments of a public function.

    Args:
        tensors: arguments that must be tensors, by name.
        optional: arguments that must be tensors or None.

    Raises:
        TypeError: an argument has another type.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    for name, tensor in optional.items():
        if not (tensor is None or isinstance(tensor, Tensor)):
            raise TypeError(f"{name} must be a tensor or None, got {type(tensor).__name__}")
    if not isinstance(options, AttentionOptions):
        given = type(options).__name__
        raise TypeError(f"options must be AttentionOptions(...) or left out, got {given}")


def check_dimensions(names: str, query: Sizes, key: Sizes, value: Sizes) -> None:
    """Raise ValueError unless the sizes of query, key and value have the dimensions `names`."""
    expected = names.count(",") + 1
    if not len(query) == len(key) == len(value) == expected:
        raise ValueError(
            f"expected query, key and value of {expected} dimensions ({names}), got {len(query)}, "
            f"{len(key)}, {len(value)}"
        )


def check_shapes(query: Sizes, key: Sizes, value: Sizes, sinks: Sizes | None = None) -> None:
    """Check the shapes of BHSD tensors, and of the sinks if there are any.

    Raises:
        ValueError: a tensor has another number of dimensions, or the shapes do not fit together.
    """
    check_dimensions("batch, heads, tokens, head dimension", query, key, value)
    batch, heads, _, head_dim = query
    kv_heads = key[1]
    if key[0] != batch or key[3] != head_dim or value[:3] != key[:3]:
        raise ValueError(
            f"query {tuple(query)}, key {tuple(key)} and value {tuple(value)} do not fit together"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if sinks is not None and sinks != (heads,):
        raise ValueError(f"sinks {tuple(sinks)}: needs one for each of {heads} query heads")


def check_head_dims(*head_dims: int) -> None:
    """Check that kernels have tiles for the head dimensions.

    Raises:
        ValueError: a head dimension is larger than 256.
    """
    if max(head_dims) > 256:
        raise ValueError(f"head_dim {max(head_dims)}: at most 256")


def sizes_of(tensor: Tensor | None) -> Sizes | None:
    return None if tensor is None else tensor.shape


def vector(name: str, tensor: Tensor | None, count: int) -> Tensor | None:
    """Return a contiguous tensor of `count` elements, as kernels require.

    Raises:
        ValueError: the tensor has another shape.
    """
    if tensor is None:
        return None
    if tensor.shape != (count,):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}: needs {count} numbers")
    return tensor.contiguous()


def check_integers(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check the type, shape and device of an optional tensor of integers.

    Raises:
        TypeError: the argument is neither a tensor nor None.
        ValueError: the tensor is not int32, or has another shape or device.
    """
    check_types({}, **{name: tensor})
    if tensor is None:
        return
    if tensor.shape != shape or tensor.dtype != torch.int32 or tensor.device != device:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}: expected "
            f"{tuple(shape)} in torch.int32 on {device}"
        )
