"""Preserves strides, which affect a kernel's speed but cannot be stored by safetensors.

A recorded tensor is often a view: of a fused projection (gaps between rows), of a BSHD tensor
(heads and positions swapped), or of a mask expanded over heads (stride 0). Files store the values
in memory order, without gaps and without the repetitions of expanded dimensions. The layout is
stored separately.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_LONGEST = 2**48
"""Upper limit of sizes and strides, beyond any real memory."""


@dataclass(frozen=True)
class Layout:
    """Size and stride (in elements) of a tensor in the model, and dimension order in the file."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...] = ()
    """Dimensions in the order of the file; empty for the tensor's own order."""

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return _layout(tuple(tensor.shape), tensor.stride())

    @classmethod
    def from_json(cls, data: Any) -> Layout:
        """Read a layout of four dimensions from JSON."""
        if not isinstance(data, dict):
            raise ValueError("a layout is not an object")
        size, stride = (_numbers(data.get(name), name) for name in ("size", "stride"))
        order = _numbers(data.get("order", []), "order")
        if not len(size) == len(stride) == 4 or (order and sorted(order) != [0, 1, 2, 3]):
            raise ValueError(f"not a layout of four dimensions: {size}, {stride}, {order}")
        return _layout(size, stride, order)

    @property
    def unexpanded(self) -> tuple[int, ...]:
        """Sizes, with 1 for each expanded (stride 0) dimension."""
        return tuple(
            1 if stride == 0 and size > 1 else size
            for size, stride in zip(self.size, self.stride, strict=True)
        )

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the values in the file."""
        sizes = self.unexpanded
        return tuple(sizes[dim] for dim in self._dimensions)

    @property
    def extent(self) -> int:
        """Number of elements of memory that the restored tensor spans, including gaps."""
        if not self.is_representable or not math.prod(self.size):
            return math.prod(self.stored)
        return 1 + sum(
            stride * (size - 1) for size, stride in zip(self.size, self.stride, strict=True)
        )

    @property
    def is_representable(self) -> bool:
        """True if elements do not share addresses, except along expanded (stride 0) dimensions.

        Overlapping windows (`Tensor.unfold`) share addresses, and are restored as contiguous
        tensors.
        """
        reach = 0
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1 or stride == 0:
                continue
            if stride <= reach:
                return False
            reach += stride * (size - 1)
        return True

    @property
    def is_stored_as_in_memory(self) -> bool:
        """True if the tensor's memory has no gaps, so that the file has the same memory layout."""
        sizes, expected = self.unexpanded, 1
        for dim in reversed(self._dimensions):
            if sizes[dim] != 1:
                if self.stride[dim] != expected:
                    return False
                expected *= sizes[dim]
        return True

    def logical(self, values: Tensor) -> Tensor:
        """View stored values with the tensor's own order of dimensions."""
        return values.permute([self._dimensions.index(dim) for dim in range(len(self.size))])

    def in_memory_order(self) -> Layout:
        """Return the layout that stores the values in memory order."""
        if not self.is_representable or not math.prod(self.size):
            return self
        moving = [dim for dim, size in enumerate(self.unexpanded) if size > 1]
        by_stride = iter(sorted(moving, key=lambda dim: -self.stride[dim]))
        order = tuple(next(by_stride) if dim in moving else dim for dim in range(len(self.size)))
        return replace(self, order=() if list(order) == sorted(order) else order)

    @property
    def _dimensions(self) -> tuple[int, ...]:
        return self.order or tuple(range(len(self.size)))


def pack(tensor: Tensor) -> tuple[Tensor, Layout]:
    """Copy the values of `tensor` to the CPU, without gaps and expansion; return values and layout.

    The values have the shape `layout.stored`.
    """
    values, layout = as_stored(tensor)
    return values.to("cpu", copy=True).contiguous(), layout


def as_stored(tensor: Tensor) -> tuple[Tensor, Layout]:
    """Return a view of `tensor` with its values in stored order, and the layout of `tensor`."""
    layout = _in_memory_order(tuple(tensor.shape), tensor.stride())
    values = narrow_expanded(tensor.detach())
    return (values.permute(layout.order) if layout.order else values), layout


def unpack(values: Tensor, layout: Layout, device: str | torch.device = "cpu") -> Tensor:
    """Restore on `device` the tensor that was passed to `pack`; the result may be a view."""
    if tuple(values.shape) != layout.stored:
        raise ValueError(f"values of shape {tuple(values.shape)}, but {layout.stored} was recorded")
    logical = layout.logical(values)
    if not layout.is_representable:
        return logical.to(device).expand(layout.size)
    if layout.is_stored_as_in_memory:
        return values.to(device).as_strided(layout.size, layout.stride)
    return _copied(logical, layout, device)


def copy_with_strides(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy `tensor` to `device` with the same strides, including expanded dimensions.

    Gaps are filled with ones.
    """
    return _copied(narrow_expanded(tensor.detach()), Layout.of(tensor), device)


def is_leading_part(part: Tensor, whole: Tensor) -> bool:
    """Return whether `part` is `whole[..., :n]` in the same memory."""
    if part.shape[:-1] != whole.shape[:-1] or not 0 < part.shape[-1] <= whole.shape[-1]:
        return False
    same_strides = all(
        size == 1 or own == other
        for size, own, other in zip(part.shape, part.stride(), whole.stride(), strict=True)
    )
    same_memory = 0 != part.data_ptr() == whole.data_ptr()
    return same_strides and same_memory and part.dtype == whole.dtype


def picked(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Copy some entries of a dimension to a tensor without gaps, in the same dimension order."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    chosen = tensor.detach().permute(order).index_select(order.index(dim), indices)
    return chosen.permute([order.index(other) for other in range(tensor.ndim)])


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate without gaps, keeping the memory order of the first tensor's dimensions.

    Other dimensions stay expanded if they are expanded in all tensors.
    """
    first = tensors[0]
    dims = range(first.ndim)
    expanded = [
        other
        for other in dims
        if other != dim and first.shape[other] > 1 and not any(t.stride(other) for t in tensors)
    ]
    size = list(first.shape)
    for other in expanded:
        tensors = [tensor.narrow(other, 0, 1) for tensor in tensors]
    # A dimension of size 1 may have the same stride as another dimension.
    order = sorted(dims, key=lambda other: (first.stride(other), first.shape[other]), reverse=True)
    joined = torch.cat([tensor.detach().permute(order) for tensor in tensors], order.index(dim))
    joined = joined.permute([order.index(other) for other in dims])
    size[dim] = joined.shape[dim]
    return joined.expand(size)


def narrow_expanded(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with each expanded (stride 0) dimension narrowed to size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# Cached, because thousands of calls share few layouts. The garbage collector then visits fewer
# objects.
@functools.lru_cache(maxsize=1024)
def _layout(size: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...] = ()) -> Layout:
    return Layout(size, stride, order)


@functools.lru_cache(maxsize=1024)
def _in_memory_order(size: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    return Layout(size, stride).in_memory_order()


def _copied(values: Tensor, layout: Layout, device: str | torch.device) -> Tensor:
    """Copy unexpanded values into new memory with the strides of `layout`."""
    size = layout.unexpanded
    if layout.is_representable:
        restored = torch.empty_strided(size, layout.stride, dtype=values.dtype, device=device)
        if layout.extent > restored.numel():
            restored.as_strided((layout.extent,), (1,)).fill_(1)  # so that every copy is the same
    else:
        restored = torch.empty(size, dtype=values.dtype, device=device)
    return restored.copy_(values).expand(layout.size)


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(
        type(number) is int and 0 <= number < _LONGEST for number in value
    ):
        raise ValueError(f"{name} is not a list of sizes: {str(value)[:80]}")
    return tuple(value)
