"""Prefill with 8-bit operands: INT8 or FP8 QKᵀ, and 16-bit or FP8 PV.

The algorithm is FlashAttention's (Dao 2023): blocks of keys in turn, a running maximum and sum for
every row. What is quantised, and how, is in `quantise.py`. Scales enter in one multiplication that
is there anyway: that of scores by softmax's scale · log2 e, which is in the query's scale.

FP8 probabilities use the whole range of e4m3: exp2(score - maximum) · 448. A block's value scale is
a factor of its probabilities rather than of its output, in the form of an addend to the exponent:
with the scale's logarithm counted into the running maximum they still end at 448. The sum that the
output is divided by takes it out again, one multiplication a row.

The tensor cores add FP8 products with 14 bits or so, and lose more the more the accumulator holds
(DeepSeek-V3 report, 2024). So each block's product starts at zero and is added in float32.

NaN anywhere in a query makes that row NaN, NaN in a key every row that sees its group, NaN in an
FP8 value that column of every such row. Infinity counts as NaN, except in a value of 16 bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from replay.kernels.triton.descriptors import at, nowhere
from replay.kernels.triton.launch import Kept, Launch, PlannedCall, layout, named
from replay.kernels.triton.matmul import INTERPRETED
from replay.kernels.triton.quantise import (
    FP8_MAX,
    GROUP,
    INT8_MAX,
    SMALLEST_MAXIMUM,
    QuantisedKeyValue,
    padded_dim,
    quantise_key_value,
    round_to_fp8,
    to_fp8,
    to_int8,
)

LOG2_E = 1.4426950408889634
LOG2_FP8_MAX = tl.constexpr(8.8073549)
"""log2(448), rounded down."""


class Tile(NamedTuple):
    """What a program works on at a time, and with what."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_for(head_dim: int, q_len: int) -> Tile:
    """The tile for a padded head dimension."""
    if q_len <= 64:
        return Tile(64, 64, 4, 3)
    if head_dim <= 64:
        return Tile(128, 128, 8, 3)
    if head_dim <= 128:
        return Tile(128, 128, 8, 3)
    return Tile(64, 64, 8, 2)


@triton.jit
def _quantise_query(query, IS_INT8: tl.constexpr):
    """(M, D) float32 in 8 bits and (M,) scales; a scale is NaN where its row is not finite."""
    is_finite = tl.abs(query) < float("inf")
    not_finite = tl.sum(query * 0.0, axis=1)
    query = tl.where(is_finite, query, 0.0)
    largest = tl.maximum(tl.max(tl.abs(query), axis=1), SMALLEST_MAXIMUM)
    if IS_INT8:
        quantised = to_int8(query, largest[:, None])
        scale = largest / INT8_MAX
    else:
        quantised = to_fp8(query, largest[:, None])
        scale = largest / FP8_MAX
    return quantised, scale + not_finite


@triton.jit
def _attend_blocks(
    first,
    end,
    output,
    maximum,
    total,
    query,
    query_scale,
    key_desc,
    key_row,
    key_scale_ptr,
    value_desc,
    value_batch,
    value_head,
    value_scale_ptr,
    rows,
    kv_len,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
    FP8_VALUE: tl.constexpr,
):
    """Blocks of keys `first` … `end` - 1 into the running output, maximum and sum."""
    for block in tl.range(first, end):
        start = block * BLOCK_N
        group = start // GROUP
        key = key_desc.load([key_row + start, 0])
        scores = tl.dot(query, key.T).to(tl.float32)
        scale = query_scale * tl.load(key_scale_ptr + group)
        if IS_MASKED:
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            is_seen = columns < kv_len
            if IS_CAUSAL:
                is_seen = is_seen & (columns <= rows[:, None])
            scores = tl.where(is_seen, scores * scale[:, None], float("-inf"))
            largest = tl.max(scores, axis=1)
        else:
            # No scale is negative, so that the largest product is the largest score.
            largest = tl.max(scores, axis=1) * scale
        if FP8_VALUE:
            value_scale = tl.load(value_scale_ptr + group)
            exponent = tl.log2(value_scale)
            new_maximum = tl.maximum(maximum, largest + exponent)
            origin = new_maximum - exponent - LOG2_FP8_MAX
        else:
            new_maximum = tl.maximum(maximum, largest)
            origin = new_maximum
        if IS_MASKED:
            weights = tl.exp2(scores - origin[:, None])
        else:
            weights = tl.exp2(scores * scale[:, None] - origin[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        output *= shrink[:, None]
        if FP8_VALUE:
            total = total * shrink + tl.sum(weights, axis=1) / value_scale
            # Into KEY_ORDER, which for the thread that holds them is a change of names only.
            weights = round_to_fp8(weights).reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
            weights = weights.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)
            value = value_desc.load([value_batch, start])
            output += tl.dot(weights, value.T)
        else:
            total = total * shrink + tl.sum(weights, axis=1)
            value = value_desc.load([value_batch, value_head, start, 0]).reshape(BLOCK_N, BLOCK_DV)
            weights = weights.to(value.dtype)
            if INTERPRETED:
                # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
                weights, value = weights.to(tl.float32), value.to(tl.float32)
            output = tl.dot(weights, value, output)
    return output, maximum, total


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "q_len", "kv_len", "groups"])
def _prefill(
    query_ptr,
    key_desc,
    key_scale_ptr,
    value_desc,
    value_scale_ptr,
    output_ptr,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
    groups,
    factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    FP8_VALUE: tl.constexpr,
):
    """One block of queries of one head. `factor` is softmax's scale · log2 e."""
    q_blocks = tl.cdiv(q_len, BLOCK_M)
    head, q_block = tl.program_id(0) // q_blocks, tl.program_id(0) % q_blocks
    if IS_CAUSAL:
        # The longest rows first, so that the last programs to end are short ones.
        q_block = q_blocks - 1 - q_block
    batch, q_head = head // q_heads, head % q_heads
    kv_head = q_head // (q_heads // kv_heads)

    rows = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    query_ptr += batch.to(tl.int64) * stride_b + q_head.to(tl.int64) * stride_h
    query = tl.load(
        query_ptr + rows[:, None].to(tl.int64) * stride_s + columns[None, :] * stride_d,
        mask=(rows[:, None] < q_len) & (columns[None, :] < HEAD_DIM),
        other=0.0,
    )
    is_int8: tl.constexpr = key_desc.dtype == tl.int8
    query, query_scale = _quantise_query(query.to(tl.float32) * factor, is_int8)

    at = batch * kv_heads + kv_head
    key_scale_ptr += at * groups
    if FP8_VALUE:
        value_scale_ptr += at * groups
        value_batch, value_head = at * BLOCK_DV, 0
    else:
        value_batch, value_head = batch, kv_head
    output = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    whole, end = kv_len // BLOCK_N, tl.cdiv(kv_len, BLOCK_N)
    if IS_CAUSAL:
        whole = tl.minimum(whole, (q_block * BLOCK_M + 1) // BLOCK_N)
        end = tl.minimum(end, tl.cdiv(q_block * BLOCK_M + BLOCK_M, BLOCK_N))
    for masked in tl.static_range(2):
        output, maximum, total = _attend_blocks(
            whole if masked else 0,
            end if masked else whole,
            output,
            maximum,
            total,
            query,
            query_scale,
            key_desc,
            at * groups * GROUP,
            key_scale_ptr,
            value_desc,
            value_batch,
            value_head,
            value_scale_ptr,
            rows,
            kv_len,
            BLOCK_M,
            BLOCK_N,
            BLOCK_DV,
            GROUP,
            IS_CAUSAL,
            masked == 1,
            FP8_VALUE,
        )

    output /= total[:, None]
    columns = tl.arange(0, BLOCK_DV)
    output_ptr += head.to(tl.int64) * q_len * V_HEAD_DIM
    tl.store(
        output_ptr + rows[:, None].to(tl.int64) * V_HEAD_DIM + columns[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=(rows[:, None] < q_len) & (columns[None, :] < V_HEAD_DIM),
    )


def describable(value: Tensor) -> Tensor:
    """`value`, or a copy where a tensor descriptor cannot describe its strides.

    The last must be 1, the others positive multiples of 16 bytes, and so must the address be.
    """
    step = 16 // value.element_size()
    others = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    aligned = all(stride > 0 and stride % step == 0 for stride in others[:-1])
    if value.stride(-1) == 1 and value.shape[-1] > 1 and aligned and value.data_ptr() % 16 == 0:
        return value
    copy = value.new_empty((*value.shape[:-1], -(-value.shape[-1] // step) * step))
    return copy[..., : value.shape[-1]].copy_(value)


def value_strides(value: Tensor) -> list[int]:
    """Strides for a tensor descriptor: a dimension of size 1 may have any, and not all will do."""
    strides = [
        stride if size > 1 else 64
        for size, stride in zip(value.shape[:3], value.stride()[:3], strict=True)
    ]
    return [*strides, 1]


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type != "cpu" and torch.cuda.get_device_capability(device) == (9, 0)


def attend(
    query: Tensor,
    quantised: QuantisedKeyValue,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of `query` (B, Hq, Sq, D), any strides, to a quantised key and value.

    Returns (B, Hq, Sq, Dv) in the query's dtype. Causal is aligned top left. `scale` defaults to
    1/sqrt(D). Query heads share key heads in groups when there are more of them.
    """
    value = quantised.value
    if quantised.value_scale is None:
        value = describable(value)
    output = query.new_empty((*query.shape[:3], quantised.v_head_dim))
    shape = (
        query.device,
        *map(layout, (query, quantised.key, value, quantised.value_scale)),
        quantised.kv_len,
        quantised.v_head_dim,
        is_causal,
        scale,
    )
    planned = _calls.get(shape) or _calls.keep(
        shape, _plan(query, quantised, value, is_causal, scale)
    )
    assert planned.descriptors is not None
    of_key, of_value = planned.descriptors
    planned.launch(
        query,
        at(of_key, quantised.key),
        quantised.key_scale,
        at(of_value, value),
        quantised.key_scale if quantised.value_scale is None else quantised.value_scale,
        output,
    )
    return output


_calls: Kept[PlannedCall] = Kept()


def _plan(
    query: Tensor,
    quantised: QuantisedKeyValue,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
) -> PlannedCall:
    """All of a call but its tensors' addresses; `value` is as a tensor descriptor takes it."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, block_dim = quantised.key.shape[1], quantised.key.shape[3]
    block_v_dim = padded_dim(quantised.v_head_dim)
    fp8_value = quantised.value_scale is not None
    factor = (head_dim**-0.5 if scale is None else scale) * LOG2_E
    largest_dim = max(block_dim, block_v_dim)
    if _is_hopper(query.device) and largest_dim <= 128:
        # Gluon is imported only where it is of use.
        from replay.kernels.triton import quantised_hopper

        return quantised_hopper.plan(
            query, quantised, value, value_strides(value), is_causal, factor
        )
    tile = tile_for(largest_dim, q_len)
    key_desc = TensorDescriptor.from_tensor(quantised.key.flatten(0, 2), [tile.keys, block_dim])
    if fp8_value:
        value_desc = TensorDescriptor.from_tensor(value.flatten(0, 2), [block_v_dim, tile.keys])
    else:
        block = [1, 1, tile.keys, block_v_dim]
        value_desc = TensorDescriptor(value, list(value.shape), value_strides(value), block)
    launch = Launch(
        _prefill,
        (-(-q_len // tile.queries) * batch * q_heads, 1, 1),
        query.device,
        named("stride_", "bhsd", query.stride())
        | {
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": quantised.kv_len,
            "groups": quantised.key_scale.shape[2],
            "factor": factor,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_dim,
            "V_HEAD_DIM": quantised.v_head_dim,
            "BLOCK_DV": block_v_dim,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "GROUP": GROUP,
            "IS_CAUSAL": is_causal,
            "FP8_VALUE": fp8_value,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return PlannedCall(launch, (nowhere(key_desc), nowhere(value_desc)))


def quantised_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    score_dtype: torch.dtype = torch.int8,
    fp8_value: bool = False,
    smooth_k: bool = True,
) -> Tensor:
    """softmax(scale · QKᵀ) · V with operands in 8 bits, quantisation included.

    `query` (B, Hq, Sq, D), `key` (B, Hkv, Sk, D) and `value` (B, Hkv, Sk, Dv) of any strides,
    float16 or bfloat16, Hq a multiple of Hkv, D and Dv at most 256. Returns (B, Hq, Sq, Dv) in
    their dtype. `score_dtype` (int8 or float8_e4m3fn) is what QKᵀ is computed in, `fp8_value`
    whether PV is in FP8 or in the call's dtype. `smooth_k` subtracts a mean of the keys from
    all; the key itself is not changed. FP8 needs compute capability 8.9.
    """
    if key.shape[2] == 0 or query.numel() == 0:
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    quantised = quantise_key_value(key, value, score_dtype, fp8_value, smooth_k)
    return attend(query, quantised, is_causal, scale=scale)
