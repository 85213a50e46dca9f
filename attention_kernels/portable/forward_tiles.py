"""How `forward_kernel.py` cuts up a call: pieces of a head dimension, rows, keys and warps."""

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
    """Whether pointers cost less than descriptors, which the host makes anew for each call.

    Of so few scores an H200 computed from 4 % slower to 40 % faster through pointers, with blocks
    of their own, and its host was done 28 µs sooner.
    """
    batch, heads, q_len, head_dim = query.shape
    k_len, widest = key.shape[2], max(head_dim, value.shape[3])
    return batch * heads * q_len * k_len < FEW_SCORES and k_len <= FEW_KEYS and widest <= 128


class Blocks(NamedTuple):
    """How a call is cut up."""

    rows: int
    """Queries of a program."""
    keys: int
    """Keys at a time."""
    warps: int
    stages: int
    """Blocks of keys and values in flight."""
    registers: int | None = None
    """The most a thread may take, so that more programs share a multiprocessor."""


def blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    has_descriptors: bool,
    options: AttentionOptions = PLAIN,
    mask: Tensor | None = None,
) -> Blocks:
    """The fastest found on an H200; other GPUs, and other ways to load, get what fits them.

    Args:
        mask: (B, Hq, Sq, Sk), or None for one that all queries of a head share.
    """
    left, right = options.window
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32:
        return _blocks_of_float32(head_dim)
    if mask is not None:
        return blocks_of_mask(query, value, mask, is_small=is_small(query, key, value))
    if not has_descriptors:
        if is_small(query, key, value):
            return Blocks(64, 32 if key.shape[2] < 128 else 64, 4, 3)
        if head_dim <= 64:
            return Blocks(128, 64, 4, 3)
        return Blocks(128, 64, 8, 3) if head_dim <= 128 else Blocks(64, 32, 4, 2)
    if head_dim <= 64:
        # Few rows waste less beside a diagonal.
        is_cut = is_causal or options.window != (None, None)
        return Blocks(64, 128, 4, 2) if is_cut else Blocks(128, 128, 8, 3, 128)
    if head_dim <= 128:
        # Small programs end more evenly; large ones read keys and values half as often.
        seen = key.shape[2] if left is None else left + (right or 0)
        is_short = seen < 8192
        return Blocks(64, 64, 4, 3) if is_short else Blocks(128, 64, 8, 2, 128)
    return Blocks(64, 32, 4, 2) if _has_little_memory(query.device) else Blocks(128, 64, 8, 2)


def blocks_of_mask(
    query: Tensor, value: Tensor, mask: Tensor, *, skips: bool = False, is_small: bool = False
) -> Blocks:
    """Those of calls with a mask that has a row of its own for each query.

    Of a mask whose rows are no multiples of 16 bytes, addresses take the registers that larger
    blocks would: an H200 took 3 to 17 times as long with those of plain calls.

    Args:
        mask: (B, Hq, Sq, Sk).
        skips: what it hides is not gone through, for which small blocks of rows do.
    """
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32:
        return _blocks_of_float32(head_dim)
    if head_dim > 128:
        return Blocks(64, 32, 8, 2)
    if mask_unit(mask) == 1:
        return Blocks(64, 64 if head_dim <= 96 else 32, 4, 3)
    if head_dim <= 96 or is_small:
        return Blocks(64, 64, 4, 3, 168 if head_dim <= 64 else None)
    return Blocks(64, 128, 4, 2) if skips else Blocks(128, 64, 8, 2, 128)


def _blocks_of_float32(head_dim: int) -> Blocks:
    """For exact products, which no tensor core does."""
    return Blocks(64, 32, 4, 1) if head_dim <= 64 else Blocks(32, 32, 4, 1)


@functools.cache
def _has_little_memory(device: torch.device) -> bool:
    """Whether a program can have 99 KiB of shared memory, and not 227, of GPUs that have TMA."""
    return device.type != "cpu" and torch.cuda.get_device_capability(device) >= (12, 0)
