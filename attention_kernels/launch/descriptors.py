"""Tensor descriptors for the tensor memory accelerator (TMA) of Hopper and newer GPUs.

Loads through a descriptor take no registers and hardly any instructions. Elements outside the
tensor are read as zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Return whether a device supports descriptors, which includes Triton's interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def can_be_described(tensor: Tensor) -> bool:
    """Return whether a descriptor can describe a tensor (B, H, S, D).

    Elements along D must be adjacent, and the other strides must be multiples of 16 bytes.
    """
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
    """Stand-in for a tensor in a descriptor, with the tensor's address only."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def at(descriptor: Any, tensor: Tensor | Address) -> Any:
    """Return a descriptor of the same shape and strides at another tensor's address.

    The checks of the descriptor are not repeated, so the tensor must have the same layout as the
    original one.
    """
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = tensor
    return moved


def nowhere(descriptor: Any) -> Any:
    """Return a copy of a descriptor that keeps no memory alive, to be moved with `at`."""
    return at(descriptor, Address(0))


def described(tensor: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor that loads blocks of `rows` × `columns`.

    The stride of a dimension of size 1 does not matter.
    """
    strides = [
        columns if size == 1 else stride
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns])
