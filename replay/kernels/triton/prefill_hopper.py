"""Prefill for Hopper GPUs (compute capability 9.0): how `prefill_hopper_kernel.py` is launched."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from replay.kernels.triton.descriptors import at
from replay.kernels.triton.hopper_scores import ROWS
from replay.kernels.triton.launch import Launch
from replay.kernels.triton.persistent import SHORT, multiprocessors, section_of
from replay.kernels.triton.prefill_hopper_kernel import prefill_kernel


class Schedule(NamedTuple):
    """How a call is cut up; measured on an H200 (docs/notes.md)."""

    consumers: int
    """Warp groups that compute, 2 to 4."""
    heads: int
    """Query heads of one group that a tile has side by side; divides the consumers."""
    keys: int
    """Keys of a block."""
    stages: int
    """Blocks of keys, and of values, that fit in shared memory."""
    registers: int
    """Registers per thread of a consumer."""


def schedule(head_dim: int, group: int, kv_len: int) -> Schedule:
    """For `group` query heads a key head."""
    if head_dim > 64:
        return Schedule(consumers=2, heads=1, keys=128, stages=2, registers=240)
    if kv_len <= SHORT:
        return Schedule(consumers=4, heads=math.gcd(group, 4), keys=64, stages=6, registers=112)
    return Schedule(consumers=3, heads=1, keys=128, stages=3, registers=160)


LARGEST_HEAD_DIM = 128


@overload
def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention on a Hopper GPU.

    Tensors are read where they lie if TMA can: adjacent elements of a head, every other stride and
    the address a multiple of 16 bytes. Others are copied first.

    Args:
        query: (B, Hq, Sq, D) float16 or bfloat16; D at most 128 and a multiple of 8.
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        value: (B, Hkv, Sk, D).
        is_causal: query i sees keys 0 … i (top left, as SDPA has it).
        scale: of the scores, not negative; None is 1/√D.
        return_lse: also return the natural logarithm of each row's sum of exponentials.

    Returns:
        The output, (B, Hq, Sq, D), laid out as `query` where that is dense; with `return_lse` also
        the (B, Hq, Sq) float32 logarithms.

    Raises:
        ValueError: D is too large or no multiple of 8, or the scale is negative.
    """
    head_dim = query.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim > LARGEST_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: needs a multiple of 8, at most {LARGEST_HEAD_DIM}")
    if scale < 0:
        raise ValueError(f"scale {scale}: must not be negative")
    if not _are_loadable(query, key, value):
        query, key, value = (
            each if _are_loadable(each) else each.contiguous() for each in (query, key, value)
        )
    output = torch.empty_like(query)
    if output.stride() != query.stride() and not _are_loadable(output):
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tensors = (query, key, value, output)
    launch, descriptors = _planned(
        (query.shape, key.shape, value.shape, output.shape),
        (query.stride(), key.stride(), value.stride(), output.stride()),
        query.dtype,
        query.device,
        is_causal,
        scale,
        return_lse,
    )
    lse = output  # nothing is written there
    if return_lse:
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    launch(*map(at, descriptors, tensors), lse)
    return (output, lse) if return_lse else output


Sizes = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[Sizes, ...],
    strides: tuple[Sizes, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    scale: float,
    return_lse: bool,
) -> tuple[Launch, list[TensorDescriptor]]:
    """The launch for calls of one shape, and descriptors of query, key, value and output."""
    batch, q_heads, q_len, head_dim = shapes[0]
    kv_heads, kv_len = shapes[1][1:3]
    group = q_heads // kv_heads
    plan = schedule(head_dim, group, kv_len)
    rows = (ROWS.value, plan.keys, plan.keys, ROWS.value)
    tile_dim = 64 if head_dim <= 64 else 128
    descriptors = [
        _descriptor(shape, stride, dtype, length, tile_dim)
        for shape, stride, length in zip(shapes, strides, rows, strict=True)
    ]
    blocks = -(-q_len // (ROWS.value * plan.consumers // plan.heads))
    bundles = batch * q_heads // plan.heads
    tiles = blocks * bundles
    head_bytes = 2 * kv_len * head_dim * dtype.itemsize
    launch = Launch(
        prefill_kernel,
        (min(tiles, multiprocessors(device)), 1, 1),
        device,
        {
            "q_heads": q_heads,
            "group": group,
            "q_len": q_len,
            "kv_len": kv_len,
            "tiles": tiles,
            "blocks": blocks,
            "bundles": bundles,
            "section": section_of(head_bytes, bundles, group // plan.heads, is_causal),
            "scale": scale * math.log2(math.e),
            "CONSUMERS": plan.consumers,
            "HEADS": plan.heads,
            "KEYS": plan.keys,
            "STAGES": plan.stages,
            "REGISTERS": plan.registers,
            "IS_CAUSAL": is_causal,
            "HAS_LSE": return_lse,
        },
        num_warps=4,
    )
    return launch, descriptors


def _are_loadable(*tensors: Tensor) -> bool:
    """Whether TMA can address them."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    strides = tuple([tensor.stride() for tensor in tensors])
    return together % 16 == 0 and _can_be_strides(strides, tensors[0].dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _can_be_strides(of_tensors: tuple[Sizes, ...], size: int) -> bool:
    return all(
        last == 1 and all(stride > 0 and stride * size % 16 == 0 for stride in others)
        for *others, last in of_tensors
    )


@functools.lru_cache
def _layout(rows: int, tile_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, tile_dim], element)


def _descriptor(
    shape: Sizes, strides: Sizes, dtype: torch.dtype, rows: int, tile_dim: int
) -> TensorDescriptor:
    """What TMA loads and stores tiles of; elements outside are read as 0 and not written.

    It is of a tensor without memory, for `at`.
    """
    return TensorDescriptor(
        torch.empty_strided(shape, strides, dtype=dtype, device="meta"),
        list(shape),
        list(strides),
        [1, 1, rows, tile_dim],
        _layout(rows, tile_dim, dtype),
    )
