"""Tensors with their strides: what a file cannot hold and a kernel's speed depends on.

A recorded Q, K or V is often a view: of a fused projection (gaps between rows), of a BSHD tensor
(heads and positions swapped), of a mask expanded over heads (stride 0). Files hold the values
contiguously, each expanded dimension once, and the layout beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Size and stride (in elements) of a tensor as the model had it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def is_representable(self) -> bool:
        """Whether distinct elements have distinct addresses, expanded (stride 0) dimensions aside.

        Overlapping windows (`Tensor.unfold`) do not; they come back contiguous.
        """
        reach = 0
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1 or stride == 0:
                continue
            if stride <= reach:
                return False
            reach += stride * (size - 1)
        return True


def pack(tensor: Tensor) -> tuple[Tensor, Layout]:
    """`tensor`'s values on the CPU, contiguous, each expanded dimension once; and its layout."""
    layout = Layout.of(tensor)
    return narrow_expanded(tensor.detach()).to("cpu", copy=True).contiguous(), layout


def unpack(values: Tensor, layout: Layout, device: str | torch.device = "cpu") -> Tensor:
    """The tensor that `pack` was given, on `device`.

    Raises:
        ValueError: `values` has not the shape that `layout` says.
    """
    expanded = tuple(
        1 if stride == 0 and size > 1 else size
        for size, stride in zip(layout.size, layout.stride, strict=True)
    )
    if tuple(values.shape) != expanded:
        raise ValueError(f"values of shape {tuple(values.shape)} where {expanded} was recorded")
    if layout.is_representable:
        restored = torch.empty_strided(expanded, layout.stride, dtype=values.dtype, device=device)
    else:
        restored = torch.empty(expanded, dtype=values.dtype, device=device)
    restored.copy_(values)
    return restored.expand(layout.size)


def copy_with_strides(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A copy of `tensor` on `device` with the same strides, expanded dimensions included."""
    values = narrow_expanded(tensor.detach())
    return unpack(values, Layout.of(tensor), device)


def narrow_expanded(tensor: Tensor) -> Tensor:
    """A view of `tensor` with each expanded (stride 0) dimension narrowed to one element."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
