"""Tensors as the tensor memory accelerator (TMA) of Hopper and newer GPUs takes them.

Loads through a descriptor take no registers and hardly any instructions, and what lies outside the
tensor is read as zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether it has the accelerator; the interpreter takes descriptors too."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def can_be_described(tensor: Tensor) -> bool:
    """Whether a descriptor can have it, (B, H, S, D): D adjacent, other strides of 16 bytes."""
    itemsize = tensor.element_size()
    return (
        has_tma(tensor.device)
        and tensor.numel() > 0
        and tensor.dtype != torch.float32
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            size == 1 or (stride > 0 and stride * itemsize % 16 == 0)
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    )


class Address:
    """Memory in a descriptor, where nobody asks for more of a tensor than where it lies."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def at(descriptor: Any, tensor: Tensor | Address) -> Any:
    """A descriptor of the same shape and strides at another tensor's address.

    Its checks are not made again: the tensor must be as the descriptor's own was.
    """
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = tensor
    return moved


def nowhere(descriptor: Any) -> Any:
    """A descriptor that may be kept, to be moved, without keeping a tensor's memory."""
    return at(descriptor, Address(0))


def described(tensor: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of blocks of `rows` × `columns`; the stride of a dimension of 1 is free."""
    strides = [
        columns if size == 1 else stride
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns])
