"""Preserves strides, which safetensors cannot store and a kernel's speed depends on.

A recorded tensor is often a view: of a fused projection (gaps between rows), of a BSHD tensor
(heads and positions swapped), or of a mask expanded over heads (stride 0). Files store the values
contiguously, each expanded dimension once, and the layout separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Size and stride (in elements) of a tensor in the model."""

    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def is_representable(self) -> bool:
        """Whether distinct elements have distinct addresses, expanded (stride 0) dimensions aside.

        Overlapping windows (`Tensor.unfold`) do not; they are restored as contiguous tensors.
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
    """Copy `tensor`'s values to the CPU, contiguous and unexpanded; return them and its layout."""
    layout = Layout.of(tensor)
    return narrow_expanded(tensor.detach()).to("cpu", copy=True).contiguous(), layout


def unpack(values: Tensor, layout: Layout, device: str | torch.device = "cpu") -> Tensor:
    """Restore on `device` the tensor passed to `pack`.

    Raises:
        ValueError: the shape of `values` does not match `layout`.
    """
    expanded = tuple(
        1 if stride == 0 and size > 1 else size
        for size, stride in zip(layout.size, layout.stride, strict=True)
    )
    if tuple(values.shape) != expanded:
        raise ValueError(f"values of shape {tuple(values.shape)}, but {expanded} was recorded")
    if layout.is_representable:
        restored = torch.empty_strided(expanded, layout.stride, dtype=values.dtype, device=device)
    else:
        restored = torch.empty(expanded, dtype=values.dtype, device=device)
    restored.copy_(values)
    return restored.expand(layout.size)


def copy_with_strides(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy `tensor` to `device` with the same strides, expanded dimensions included."""
    values = narrow_expanded(tensor.detach())
    return unpack(values, Layout.of(tensor), device)


def narrow_expanded(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with each expanded (stride 0) dimension narrowed to size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
