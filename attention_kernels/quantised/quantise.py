"""Quantisation of key and value to 8 bits, in the layout of the kernels of `quantised_prefill.py`.

Key: INT8 or FP8 (e4m3), one scale for every `GROUP` keys of a head. By default a mean of the head's
keys is subtracted first ("K smoothing", SageAttention, Zhang et al. 2024). This removes the offset
that the keys of many models share, which would use up the 8 bits. Subtracting the same vector from
all keys shifts all scores of a query by the same number, which softmax ignores. The exact mean,
which would require another read of the key, is therefore not needed. The mean is taken over
`SAMPLE` keys spread over the sequence, and an offset of an eighth of a standard deviation may
remain. Soft caps and sinks depend on the mean, so the mean is stored for them.

Value: FP8, one scale for every `GROUP` keys of a head. The value is transposed, because 8-bit
operands of the tensor cores must be adjacent along the summed dimension, here the keys. Within
every 16 keys the order is `KEY_ORDER`, in which a thread holds its scores, so that probabilities go
into the second product without being exchanged between threads.

The attention kernel itself quantises the query, with one scale per row, because the query is read
only once.

Key and value are quantised in one launch. Rows beyond the last key are zeros, and their scores are
masked.

With `Lengths`, each batch element begins with a new group and has its own scales and mean. A padded
element begins at its first valid key. Sequence n of a packed batch, whose first key is number s,
begins with group s // `GROUP` + n. With this numbering, sequences never overlap, for any lengths,
which the host does not know.

A NaN or an infinity in an INT8 group of keys makes the scale and every score of that group NaN. In
FP8, only that element becomes NaN. In a sampled key, a NaN or an infinity makes the mean and all
scores of the head NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.launcher import Launch, layout, named
from attention_kernels.launch.shape_checks import Sizes, check_shapes
from attention_kernels.options import Lengths
from attention_kernels.tiles.round_to_eight_bits import (
    FP8_MAX,
    INT8_MAX,
    SMALLEST_MAXIMUM,
    sampled_mean,
    to_fp8,
    to_int8,
)

GROUP = 128
"""Number of keys that share a scale."""

KEY_ORDER = tuple(8 * pair + 2 * lane + i for lane in range(4) for pair in (0, 1) for i in (0, 1))
"""Order of values: the key whose value is stored at each of 16 positions.

Of 16 neighbouring scores in a row, lane l of four holds columns 2l, 2l+1, 8+2l and 9+2l (PTX, the
accumulator of `wgmma` and `mma.m16n8`). In an 8-bit left operand, that lane holds columns 4l …
4l+3.
"""


@dataclass(frozen=True)
class QuantisedKeyValue:
    """Key and value in the form that the attention kernels of `quantised_prefill.py` read.

    N is Sk rounded up to a multiple of `GROUP`; in a packed batch, the maximum that its sequences
    can need.
    """

    key: Tensor
    """(B, Hkv, N, D') int8 or float8_e4m3fn, D' = `padded_dim(D)`, zeros beyond Sk and D."""
    key_scale: Tensor
    """(B, Hkv, N / GROUP) float32: key ≈ quantised · scale (+ mean)."""
    value: Tensor
    """(B, Hkv, D', N) float8_e4m3fn in `KEY_ORDER`, or the value (B, Hkv, Sk, Dv) unchanged."""
    value_scale: Tensor | None
    """(B, Hkv, N / GROUP) float32; None if the value is in 16 bits."""
    kv_len: int
    v_head_dim: int
    is_smooth: bool
    """True if a mean was subtracted from the key."""
    key_mean: Tensor | None = None
    """(B, Hkv, D') float32, the subtracted mean, if it is stored; in a packed batch, B is the
    number of sequences."""
    lengths: Lengths | None = None
    """Valid keys of each batch element; None if all are valid."""

    @functools.cached_property
    def layouts(self) -> Hashable:
        """Return everything that a plan may depend on, except the value's layout."""
        return (
            *map(layout, (self.key, self.value_scale, self.key_mean)),
            self.kv_len,
            self.v_head_dim,
            self.lengths and (*self.lengths[:3], *map(layout, self.lengths[3:])),
        )


def padded_dim(head_dim: int) -> int:
    """Return the size of a tensor-core tile that holds `head_dim`: a power of two, at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


@triton.jit
def _quantise_key(
    key_ptr,
    stride_s,
    stride_d,
    output_ptr,
    scale_ptr,
    mean_ptr,
    group,
    kv_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTH: tl.constexpr,
    KEEP_MEAN: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,
):
    """Quantise one group of keys. `output_ptr` points to the group, the other pointers to its
    head."""
    rows = group * GROUP + tl.arange(0, GROUP)
    columns = tl.arange(0, BLOCK_D)
    is_key = (rows[:, None] < kv_len) & (columns[None, :] < HEAD_DIM)
    offsets = rows[:, None].to(tl.int64) * stride_s + columns[None, :] * stride_d
    key = tl.load(key_ptr + offsets, mask=is_key, other=0.0).to(tl.float32)
    if SMOOTH:
        is_column = columns < HEAD_DIM
        if MAY_BE_EMPTY:
            is_column = is_column & (kv_len > 0)
        mean = sampled_mean(key_ptr, stride_s, stride_d, columns, is_column, kv_len)
        key = tl.where(is_key, key - mean[None, :], 0.0)
        if KEEP_MEAN and group == 0:
            tl.store(mean_ptr + columns, mean)
    is_finite = tl.abs(key) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(key), 0.0))
    largest = tl.maximum(largest, SMALLEST_MAXIMUM)
    output = output_ptr + tl.arange(0, GROUP)[:, None] * BLOCK_D + columns[None, :]
    if output_ptr.dtype.element_ty == tl.int8:
        tl.store(output, to_int8(tl.where(is_finite, key, 0.0), largest))
        tl.store(scale_ptr + group, largest / INT8_MAX + tl.sum(key * 0.0))
    else:
        tl.store(output, to_fp8(tl.where(is_finite, key, float("nan")), largest))
        tl.store(scale_ptr + group, largest / FP8_MAX)


@triton.jit
def _quantise_value(
    value_ptr,
    stride_s,
    stride_d,
    output_ptr,
    scale_ptr,
    group,
    groups,
    kv_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantise one group of values, transposed and in `KEY_ORDER`. The pointers point to the
    group's head."""
    # KEY_ORDER: bit 1 of a position is the pair, bits 2 and 3 are the lane.
    position = tl.arange(0, GROUP)
    order = (position & ~15) + (position & 1) + (position & 2) * 4 + (position & 12) // 2
    rows = group * GROUP + order
    columns = tl.arange(0, BLOCK_D)
    is_value = (rows[:, None] < kv_len) & (columns[None, :] < HEAD_DIM)
    offsets = rows[:, None].to(tl.int64) * stride_s + columns[None, :] * stride_d
    value = tl.load(value_ptr + offsets, mask=is_value, other=0.0).to(tl.float32)
    is_finite = tl.abs(value) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(value), 0.0))
    largest = tl.maximum(largest, SMALLEST_MAXIMUM)
    quantised = to_fp8(tl.where(is_finite, value, float("nan")), largest)
    row = columns[:, None].to(tl.int64) * groups * GROUP
    tl.store(output_ptr + row + group * GROUP + position[None, :], tl.trans(quantised))
    tl.store(scale_ptr + group, largest / FP8_MAX)


@triton.jit
def first_group(k_start, sequence, GROUP: tl.constexpr):
    """Return the first group of a packed batch's sequence."""
    return k_start // GROUP + sequence


@triton.jit
def _sequence_of(group, k_starts_ptr, sequences, GROUP: tl.constexpr):
    """Return the sequence of a packed batch to which a group belongs: the last one that begins at
    or before the group."""
    before = 0
    for some in range(0, sequences, 128):
        each = some + tl.arange(0, 128)
        is_one = each < sequences
        k_start = tl.load(k_starts_ptr + each, mask=is_one, other=0).to(tl.int32)
        before += tl.sum((is_one & (first_group(k_start, each, GROUP) <= group)).to(tl.int32))
    return tl.maximum(before - 1, 0)


@triton.jit(do_not_specialize=["kv_heads", "kv_len", "groups", "sequences"])
def _quantise(
    key_ptr,
    value_ptr,
    key_out_ptr,
    key_scale_ptr,
    value_out_ptr,
    value_scale_ptr,
    key_mean_ptr,
    k_starts_ptr,
    k_lengths_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    key_stride_d,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    value_stride_d,
    kv_heads,
    kv_len,
    groups,
    sequences,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTH: tl.constexpr,
    KEEP_MEAN: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """Quantise one group of keys, or one group of values in programs whose second index is 1.

    `groups` is the number of groups that a head has room for, `sequences` that of sequences in a
    packed batch. `k_starts_ptr` and `k_lengths_ptr` point to the tensors of `Lengths`, or are None.
    """
    group, head = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    batch, kv_head = head // kv_heads, head % kv_heads
    of_mean = head
    first = 0
    if HAS_LENGTHS:
        k_start = 0
        element = batch
        if sequences is not None:
            element = _sequence_of(group, k_starts_ptr, sequences, GROUP)
            of_mean = element.to(tl.int64) * kv_heads + kv_head
            k_start = tl.load(k_starts_ptr + element).to(tl.int32)
            kv_len = tl.load(k_starts_ptr + element + 1).to(tl.int32) - k_start
            first = first_group(k_start, element, GROUP)
            group -= first
        elif k_starts_ptr is not None:
            k_start = tl.load(k_starts_ptr + element).to(tl.int32)
        if k_lengths_ptr is not None:
            length = tl.load(k_lengths_ptr + element).to(tl.int32)
            kv_len = tl.minimum(kv_len, length)
        # Groups without keys are skipped, except the first group of an element without keys.
        if (group < 0) | ((group > 0) & (group * GROUP >= kv_len)):
            return
        key_ptr += tl.cast(k_start, tl.int64) * key_stride_s
        value_ptr += tl.cast(k_start, tl.int64) * value_stride_s
    if tl.program_id(1) == 0:
        if KEEP_MEAN:
            key_mean_ptr += of_mean * BLOCK_D
        _quantise_key(
            key_ptr + batch * key_stride_b + kv_head * key_stride_h,
            key_stride_s,
            key_stride_d,
            key_out_ptr + (head * groups + first + group) * GROUP * BLOCK_D,
            key_scale_ptr + head * groups + first,
            key_mean_ptr,
            group,
            kv_len,
            HEAD_DIM,
            BLOCK_D,
            GROUP,
            SMOOTH,
            KEEP_MEAN,
            HAS_LENGTHS,
        )
    elif value_scale_ptr is not None:
        _quantise_value(
            value_ptr + batch * value_stride_b + kv_head * value_stride_h,
            value_stride_s,
            value_stride_d,
            value_out_ptr + head * BLOCK_DV * groups * GROUP + first * GROUP,
            value_scale_ptr + head * groups + first,
            group,
            groups,
            kv_len,
            V_HEAD_DIM,
            BLOCK_DV,
            GROUP,
        )


def quantise_key_value(
    key: Tensor,
    value: Tensor,
    key_dtype: torch.dtype = torch.int8,
    quantise_value: bool = False,
    smooth_k: bool = True,
    keep_mean: bool = False,
    lengths: Lengths | None = None,
) -> QuantisedKeyValue:
    """Quantise the key to `key_dtype` (int8 or float8_e4m3fn) and, with `quantise_value`, the value
    to float8_e4m3fn.

    `key` (B, Hkv, Sk, D) and `value` (B, Hkv, Sk, Dv) are float16 or bfloat16, with any strides and
    Sk at least 1. `smooth_k` subtracts a mean over the sequence from the key. `keep_mean` stores
    that mean, for soft caps and sinks. With `lengths`, invalid keys and values are not read.

    Raises:
        ValueError: the shapes do not fit together.
    """
    check_shapes(key.shape, key.shape, value.shape)
    batch, kv_heads, kv_len, head_dim = key.shape
    v_head_dim = value.shape[3]
    groups = groups_for(kv_len, lengths)
    block_dim, block_v_dim = padded_dim(head_dim), padded_dim(v_head_dim)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return key.new_empty((batch, kv_heads, *shape), dtype=dtype)

    key_out = empty(groups * GROUP, block_dim, dtype=key_dtype)
    key_scale = empty(groups, dtype=torch.float32)
    value_out, value_scale = value, None
    if quantise_value:
        value_out = empty(block_v_dim, groups * GROUP, dtype=torch.float8_e4m3fn)
        value_scale = empty(groups, dtype=torch.float32)
    key_mean = None
    if smooth_k and keep_mean:
        batches = batch if lengths is None else lengths.batches
        key_mean = key.new_empty((batches, kv_heads, block_dim), dtype=torch.float32)
    launch = launch_of(
        key, value, key_dtype, quantise_value, smooth_k, key_mean is not None, lengths
    )
    k_starts, k_lengths = (None, None) if lengths is None else (lengths.k_starts, lengths.k_lengths)
    launch(key, value, key_out, key_scale, value_out, value_scale, key_mean, k_starts, k_lengths)
    return QuantisedKeyValue(
        key_out, key_scale, value_out, value_scale, kv_len, v_head_dim, smooth_k, key_mean, lengths
    )


def groups_for(kv_len: int, lengths: Lengths | None) -> int:
    """Return the number of groups that can hold `kv_len` keys of a head, for any lengths of the
    sequences."""
    if lengths is not None and lengths.kind == "packed":
        return kv_len // GROUP + lengths.batches
    return -(-kv_len // GROUP)


def launch_of(
    key: Tensor,
    value: Tensor,
    key_dtype: torch.dtype,
    quantise_value: bool,
    smooth_k: bool,
    keep_mean: bool,
    lengths: Lengths | None = None,
) -> Launch:
    """Return the launch that `quantise_key_value` makes for these arguments."""
    return _planned(
        (key.shape, value.shape),
        (key.stride(), value.stride()),
        (key.dtype, value.dtype),
        (key.device, value.device),
        key_dtype,
        quantise_value,
        smooth_k,
        keep_mean,
        lengths and (lengths.kind, lengths.batches, *map(layout, lengths[4:])),
    )


@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[Sizes, Sizes],
    strides: tuple[Sizes, Sizes],
    dtypes: tuple[torch.dtype, torch.dtype],
    devices: tuple[torch.device, torch.device],
    key_dtype: torch.dtype,
    quantise_value: bool,
    smooth_k: bool,
    keep_mean: bool,
    lengths: tuple[Any, ...] | None,
) -> Launch:
    """Return the launch for keys and values of one shape, type and device.

    Args:
        lengths: kind, number of batch elements, and the layouts of `k_starts` and `k_lengths`.
    """
    (batch, kv_heads, kv_len, head_dim), (*_, v_head_dim) = shapes
    kind, batches = lengths[:2] if lengths else ("full", batch)
    groups = groups_for(kv_len, Lengths(kind, batches, 0))
    return Launch(
        _quantise,
        (groups * batch * kv_heads, 2 if quantise_value else 1, 1),
        devices[0],
        named("key_stride_", "bhsd", strides[0])
        | named("value_stride_", "bhsd", strides[1])
        | {
            "kv_heads": kv_heads,
            "kv_len": kv_len,
            "groups": groups,
            "sequences": batches if kind == "packed" else None,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_dim(head_dim),
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_DV": padded_dim(v_head_dim),
            "GROUP": GROUP,
            "SMOOTH": smooth_k,
            "KEEP_MEAN": keep_mean,
            "HAS_LENGTHS": lengths is not None,
        },
        num_warps=4,
    )
