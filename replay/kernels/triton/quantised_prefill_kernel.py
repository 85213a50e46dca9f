"""Attention with 8-bit operands, in Triton, for any GPU that has them.

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

import triton
import triton.language as tl

from replay.kernels.triton.masking import may_see
from replay.kernels.triton.matmul import matmul
from replay.kernels.triton.quantise import (
    FP8_MAX,
    INT8_MAX,
    LOG2_FP8_MAX,
    SMALLEST_MAXIMUM,
    round_to_fp8,
    to_fp8,
    to_int8,
)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "q_len", "kv_len", "groups"])
def quantised_prefill_kernel(
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
            keys = start + tl.arange(0, BLOCK_N)
            seen = may_see(rows, keys, kv_len, None, None, IS_CAUSAL)
            scores = tl.where(seen, scores * scale[:, None], float("-inf"))
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
            output = matmul(weights.to(value.dtype), value, output)
    return output, maximum, total


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
