"""Sizes of a program's work in `forward_kernel.py`: rows, keys, warps and stages."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.options import PLAIN, AttentionOptions
from attention_kernels.tiles.masking import mask_unit

FEW_SCORES = 2**23
FEW_KEYS = 512


def is_small(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether pointers cost less than descriptors, which the host creates for each call.

    With few scores, an H200 was between 4 % slower and 40 % faster with pointers, using tiles
    chosen for pointers, and the host finished 28 µs earlier.
    """
    batch, heads, q_len, head_dim = query.shape
    k_len, widest = key.shape[2], max(head_dim, value.shape[3])
    return batch * heads * q_len * k_len < FEW_SCORES and k_len <= FEW_KEYS and widest <= 128


class Blocks(NamedTuple):
    """Sizes of a program's work."""

    rows: int
    """Number of a program's queries."""
    keys: int
    """Number of keys in a block."""
    warps: int
    stages: int
    """Number of blocks of keys and values in flight."""
    registers: int | None = None
    """Maximum registers per thread, so that more programs share a multiprocessor; None for Triton's
    choice."""


def blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    has_descriptors: bool,
    options: AttentionOptions = PLAIN,
    mask: Tensor | None = None,
) -> Blocks:
    """Return the fastest sizes found on an H200, with separate sizes for GPUs with little shared
    memory and for loads through pointers.

    If a call is invariant, sizes depend only on the type, the head dimensions and the kind of the
    mask, and keys are loaded through pointers.

    Args:
        mask: (B, Hq, Sq, Sk); None without a mask, or if all queries of a head share one row.
    """
    left, right = options.window
    head_dim = max(query.shape[-1], value.shape[-1])
    is_small_call = not options.invariant and is_small(query, key, value)
    if query.dtype == torch.float32:
        return _blocks_of_float32(head_dim)
    if mask is not None:
        return blocks_of_mask(
            query, value, mask, is_small=is_small_call, has_any_strides=options.invariant
        )
    if not has_descriptors:
        if is_small_call:
            return Blocks(64, 32 if key.shape[2] < 128 else 64, 4, 3)
        if head_dim <= 64:
            return Blocks(128, 64, 4, 3)
        return Blocks(128, 64, 8, 3) if head_dim <= 128 else Blocks(64, 32, 4, 2)
    if head_dim <= 64:
        # Tiles of few rows waste less work at a diagonal.
        is_cut = is_causal or options.window != (None, None)
        return Blocks(64, 128, 4, 2) if is_cut else Blocks(128, 128, 8, 3, 128)
    if head_dim <= 128:
        # Small programs balance the work better; large ones read keys and values half as often.
        seen = key.shape[2] if left is None else left + (right or 0)
        is_short = seen < 8192
        return Blocks(64, 64, 4, 3) if is_short else Blocks(128, 64, 8, 2, 128)
    return Blocks(64, 32, 4, 2) if _has_little_memory(query.device) else Blocks(128, 64, 8, 2)


def blocks_of_mask(
    query: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    skips: bool = False,
    is_small: bool = False,
    has_any_strides: bool = False,
) -> Blocks:
    """Return sizes for calls whose mask has a row for each query.

    If the rows of a mask are not multiples of 16 bytes, their addresses take the registers that
    larger blocks need. With the sizes for calls without a mask, an H200 took 3 to 17 times as long.

    Args:
        mask: (B, Hq, Sq, Sk).
        skips: whether fully masked blocks are skipped. Tiles of few rows skip more.
        has_any_strides: whether to return the sizes for masks of any strides.
    """
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32:
        return _blocks_of_float32(head_dim)
    if head_dim > 128:
        return Blocks(64, 32, 8, 2)
    if has_any_strides or mask_unit(mask) == 1:
        return Blocks(64, 64 if head_dim <= 96 else 32, 4, 3)
    if head_dim <= 96 or is_small:
        return Blocks(64, 64, 4, 3, 168 if head_dim <= 64 else None)
    return Blocks(64, 128, 4, 2) if skips else Blocks(128, 64, 8, 2, 128)


def _blocks_of_float32(head_dim: int) -> Blocks:
    """Return sizes for exact float32 products, which do not use the tensor cores."""
    return Blocks(64, 32, 4, 1) if head_dim <= 64 else Blocks(32, 32, 4, 1)


@functools.cache
def _has_little_memory(device: torch.device) -> bool:
    """Return whether a GPU with TMA gives a program 99 KiB of shared memory instead of 227 KiB."""
    return device.type != "cpu" and torch.cuda.get_device_capability(device) >= (12, 0)
