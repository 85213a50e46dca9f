"""Operands in a form that the tensor memory accelerator (TMA) of a Hopper GPU can load."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from attention_kernels.launch.shape_checks import Sizes


def are_loadable(*tensors: Tensor) -> bool:
    """Return whether TMA can address the tensors."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    layouts = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
    return together % 16 == 0 and _can_be_addressed(layouts, tensors[0].dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _can_be_addressed(layouts: tuple[tuple[Sizes, Sizes], ...], size: int) -> bool:
    """Return whether TMA can address tensors of these shapes and strides.

    The stride of a dimension of size 1 does not matter.
    """
    return all(
        strides[3] == 1
        and all(
            length == 1 or (stride > 0 and stride * size % 16 == 0)
            for length, stride in zip(shape[:3], strides[:3], strict=True)
        )
        for shape, strides in layouts
    )


def loadable_mask(attn_mask: Tensor, shape: Sizes) -> Tensor:
    """Return a mask that broadcasts to `shape` as (B or 1, Hq or 1, Sq, Sk), in a form that TMA can
    address.

    A bool mask becomes (…, Sk / 2) uint16, with two bytes in each number. A copy is padded with
    False after the last key.
    """
    mask = attn_mask.to(loadable_type(attn_mask.dtype)).expand(shape)
    for dim in (0, 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    kv_len, is_bool = shape[3], mask.dtype == torch.bool
    if not are_loadable(mask) or (is_bool and kv_len % 2):
        unit = 16 // mask.element_size()
        wide = mask.new_zeros((*mask.shape[:3], -(-kv_len // unit) * unit))
        wide[..., :kv_len].copy_(mask)
        mask = wide
    return mask.view(torch.uint16) if is_bool else mask


def loadable_type(dtype: torch.dtype) -> torch.dtype:
    """Return the element type with which TMA loads a mask."""
    kept = (torch.bool, torch.float16, torch.bfloat16, torch.float32)
    return dtype if dtype in kept else torch.float32


@functools.cache
def block_layout(block: Sizes, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a block in shared memory."""
    elements = {
        torch.int8: gl.int8,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
        torch.float32: gl.float32,
        torch.uint16: gl.uint16,
    }
    return gl.NVMMASharedLayout.get_default_for(list(block), elements[dtype])
