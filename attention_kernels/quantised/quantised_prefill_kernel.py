"""Attention with 8-bit operands, in Triton, for any GPU that supports these types.

The algorithm is that of FlashAttention (Dao 2023): a loop over blocks of keys, with a running
maximum and sum for every row. `quantise.py` describes the quantisation of the operands. The scales
cost no extra multiplication, because scores are multiplied by softmax's scale · log2 e anyway.

FP8 probabilities use the whole range of e4m3: exp2(score - maximum) · 448. A block's value scale
multiplies its probabilities instead of its output, as an addend to the exponent. The running
maximum includes the scale's logarithm, so the largest probability is still 448. The sum by which
the output is divided excludes the scale, which costs one multiplication per row.

The tensor cores add FP8 products with some 14 bits, and lose more precision as the accumulator
grows (DeepSeek-V3 report, 2024). Each block's product therefore starts at zero and is added in
float32, unless IN_TENSOR_CORES requests one accumulator for all blocks, as in FlashAttention 3 and
cuDNN.

Softmax does not depend on the mean that was subtracted from the keys, but soft caps and sinks do.
The product of the query and the mean is added to a row's scores for a soft cap, or subtracted from
the row's sink.

A NaN in a query makes the query's row NaN. A NaN in a key makes every row that sees its group NaN.
A NaN in an FP8 value makes its column of every such row NaN. Infinity counts as NaN, except in a
value of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention_kernels.quantised.quantise import first_group
from attention_kernels.tiles.masking import mask_bias, may_see, stretches
from attention_kernels.tiles.matmul import matmul
from attention_kernels.tiles.online_softmax import LOG2_E, add_sink, tanh
from attention_kernels.tiles.round_to_eight_bits import (
    FP8_MAX,
    INT8_MAX,
    LOG2_FP8_MAX,
    SMALLEST_MAXIMUM,
    round_to_fp8,
    to_fp8,
    to_int8,
)
from attention_kernels.tiles.visited_blocks import first_key


@triton.jit(
    do_not_specialize=[
        "q_heads", "kv_heads", "q_len", "q_rows", "kv_len", "groups", "left", "right", "stride_mb",
        "stride_mh", "stride_wb", "stride_wh",
    ]
)  # fmt: skip
def quantised_prefill_kernel(
    query_ptr,
    key_desc,
    key_scale_ptr,
    value_desc,
    value_scale_ptr,
    output_ptr,
    key_mean_ptr,
    sinks_ptr,
    mask_ptr,
    q_offsets_ptr,
    k_starts_ptr,
    k_lengths_ptr,
    blocks_ptr,
    counts_ptr,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_wb,
    stride_wh,
    q_heads,
    kv_heads,
    q_len,
    q_rows,
    kv_len,
    groups,
    factor,
    cap,
    left,
    right,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    FP8_VALUE: tl.constexpr,
    IN_TENSOR_CORES: tl.constexpr,
):
    """Compute one block of queries of one head.

    `factor` is softmax's scale · log2 e, or with a soft cap the factor of the exponent in tanh
    (`online_softmax.base_2`). Unused arguments are None: `sinks_ptr`, `cap`, `left` and `right`;
    `key_mean_ptr` if neither a sink nor a cap needs the mean; the mask and its `VisitedBlocks`;
    offsets, starts and lengths as in `Lengths`. In a packed batch, `q_len` is the length of the
    longest sequence, and `q_rows` is the total number of queries; otherwise `q_rows` is None.
    """
    q_blocks = tl.cdiv(q_len, BLOCK_M)
    head, q_block = tl.program_id(0) // q_blocks, tl.program_id(0) % q_blocks
    if IS_CAUSAL:
        # The longest rows come first, so that short programs end last.
        q_block = q_blocks - 1 - q_block
    batch, q_head = head // q_heads, head % q_heads
    kv_head = q_head // (q_heads // kv_heads)

    rows = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    at = batch * kv_heads + kv_head
    # Rows and keys are numbered within their sequence. Packed tensors have one batch element.
    q_start, q_len, k_start, kv_len, diagonal = _lengths_of(
        batch, q_len, kv_len, q_offsets_ptr, k_starts_ptr, k_lengths_ptr, IS_BOTTOM_RIGHT
    )
    element = batch
    head_in_memory = head
    first = 0
    if q_offsets_ptr is not None:
        if q_block * BLOCK_M >= q_len:
            return
        element = batch * 0
        head_in_memory = q_head
        first = first_group(k_start, batch, GROUP)
    kept = element * kv_heads + kv_head
    query_ptr += element.to(tl.int64) * stride_b + q_head.to(tl.int64) * stride_h
    query_ptr += q_start * stride_s
    query = tl.load(
        query_ptr + rows[:, None].to(tl.int64) * stride_s + columns[None, :] * stride_d,
        mask=(rows[:, None] < q_len) & (columns[None, :] < HEAD_DIM),
        other=0.0,
    )
    is_int8: tl.constexpr = key_desc.dtype == tl.int8
    query = query.to(tl.float32) * factor
    shift = tl.zeros([BLOCK_M], tl.float32)
    if key_mean_ptr is not None:
        shift += tl.sum(query * tl.load(key_mean_ptr + at * BLOCK_D + columns)[None, :], axis=1)
    query, query_scale = _quantise_query(query, is_int8)

    key_scale_ptr += kept * groups + first
    if FP8_VALUE:
        value_scale_ptr += kept * groups + first
        value_batch, value_head, value_key = kept * BLOCK_DV, 0, first * GROUP
    else:
        value_batch, value_head, value_key = element, kv_head, k_start
    output = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if blocks_ptr is None:
        ends = stretches(
            q_block * BLOCK_M + diagonal, 0, kv_len, left, right, BLOCK_M, BLOCK_N, IS_CAUSAL, True
        )
        for stretch in tl.static_range(1 if left is None else 0, 3):
            output, maximum, total = _attend_blocks(
                None, ends[stretch], ends[stretch + 1], output, maximum, total, query, query_scale,
                shift, key_desc, (kept * groups + first) * GROUP, key_scale_ptr, value_desc,
                value_batch, value_head, value_key, value_scale_ptr, None, 0, 0,
                rows, rows + diagonal, q_len, kv_len, cap, left, right,
                BLOCK_M, BLOCK_N, BLOCK_DV, GROUP, MASK_UNIT, IS_CAUSAL, stretch != 1,
                k_lengths_ptr is not None or q_offsets_ptr is not None, FP8_VALUE, IN_TENSOR_CORES,
            )  # fmt: skip
    else:
        mask_ptr += batch.to(tl.int64) * stride_mb + q_head.to(tl.int64) * stride_mh
        place = batch.to(tl.int64) * stride_wb + q_head.to(tl.int64) * stride_wh + q_block
        width = tl.cdiv(kv_len, BLOCK_N)
        blocks_ptr += place * 2 * width
        for kind in tl.static_range(2):
            output, maximum, total = _attend_blocks(
                blocks_ptr + kind * width, 0, tl.load(counts_ptr + place * 2 + kind),
                output, maximum, total, query, query_scale,
                shift, key_desc, kept * groups * GROUP, key_scale_ptr, value_desc,
                value_batch, value_head, value_key, value_scale_ptr, mask_ptr, stride_mm, stride_mn,
                rows, rows, q_len, kv_len, cap, None, None,
                BLOCK_M, BLOCK_N, BLOCK_DV, GROUP, MASK_UNIT, False, kind == 1,
                False, FP8_VALUE, IN_TENSOR_CORES,
            )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2_E
        if cap is None:
            sink -= shift
        unit = tl.exp2(LOG2_FP8_MAX) if FP8_VALUE else 1.0
        rescale, maximum, total = add_sink(sink, maximum, total, unit)
        output *= rescale[:, None]
    output /= tl.where(total == 0.0, 1.0, total)[:, None]
    columns = tl.arange(0, BLOCK_DV)
    if q_offsets_ptr is None:
        q_rows = q_len
    output_ptr += (head_in_memory.to(tl.int64) * q_rows + q_start) * OUTPUT_STRIDE
    tl.store(
        output_ptr + rows[:, None].to(tl.int64) * OUTPUT_STRIDE + columns[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=(rows[:, None] < q_len) & (columns[None, :] < V_HEAD_DIM),
    )


@triton.jit
def _lengths_of(
    batch, q_len, kv_len, q_offsets_ptr, k_starts_ptr, k_lengths_ptr, IS_BOTTOM_RIGHT: tl.constexpr
):
    """Return a batch element's first query in memory, its number of queries, its first key, its
    number of valid keys, and the distance from a query to its diagonal key within the element."""
    q_start = 0
    k_start = 0
    diagonal = 0
    if q_offsets_ptr is not None:
        q_start = tl.load(q_offsets_ptr + batch).to(tl.int64)
        q_len = (tl.load(q_offsets_ptr + batch + 1) - q_start).to(tl.int32)
        k_start = tl.load(k_starts_ptr + batch).to(tl.int32)
        kv_len = tl.load(k_starts_ptr + batch + 1).to(tl.int32) - k_start
        if k_lengths_ptr is not None:
            kv_len = tl.minimum(kv_len, tl.load(k_lengths_ptr + batch).to(tl.int32))
    elif k_lengths_ptr is not None:
        kv_len = tl.load(k_lengths_ptr + batch).to(tl.int32)
        if k_starts_ptr is not None:
            k_start = tl.load(k_starts_ptr + batch).to(tl.int32)
            diagonal = -k_start
    if IS_BOTTOM_RIGHT:
        diagonal = kv_len - q_len
    return q_start, q_len, k_start, kv_len, diagonal


@triton.jit
def _attend_blocks(
    blocks,
    first,
    last,
    output,
    maximum,
    total,
    query,
    query_scale,
    shift,
    key_desc,
    key_row,
    key_scale_ptr,
    value_desc,
    value_batch,
    value_head,
    value_key,
    value_scale_ptr,
    mask_ptr,
    stride_mm,
    stride_mn,
    rows,
    diagonals,
    q_len,
    kv_len,
    cap,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_PART: tl.constexpr,
    FP8_VALUE: tl.constexpr,
    IN_TENSOR_CORES: tl.constexpr,
):
    """Add the keys [first, last), or that range of `blocks`, whose entries are the first keys of
    blocks, to the running output, maximum and sum.

    `diagonals` are the diagonal keys of the rows. `shift` is the term that is added to scores
    before a soft cap. IS_PART: values past the last key may belong to another sequence.
    """
    STEP: tl.constexpr = BLOCK_N if blocks is None else 1
    next_start = first
    if blocks is not None:
        next_start = first_key(blocks, first, last, BLOCK_N)
    for place in tl.range(first, last, STEP):
        start = place
        if blocks is not None:
            start = next_start
            next_start = first_key(blocks, place + 1, last, BLOCK_N)
        group = start // GROUP
        key = key_desc.load([key_row + start, 0])
        scores = tl.dot(query, key.T).to(tl.float32)
        scale = query_scale * tl.load(key_scale_ptr + group)
        is_scaled: tl.constexpr = IS_MASKED or cap is not None
        if is_scaled:
            scores *= scale[:, None]
            if cap is not None:
                scores = cap * tanh(scores + shift[:, None])
            if IS_MASKED:
                keys = start + tl.arange(0, BLOCK_N)
                if mask_ptr is not None:
                    scores += mask_bias(
                        mask_ptr, rows, keys, q_len, kv_len, stride_mm, stride_mn, MASK_UNIT,
                        True, True, True,
                    )  # fmt: skip
                seen = may_see(diagonals, keys, kv_len, left, right, IS_CAUSAL)
                scores = tl.where(seen, scores, float("-inf"))
            largest = tl.max(scores, axis=1)
        else:
            # Scales are not negative, so the largest product gives the largest score.
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
            # For a row that has not seen a key, -inf minus -inf would be NaN.
            origin = tl.where(new_maximum == float("-inf"), 0.0, origin)
        if is_scaled:
            weights = tl.exp2(scores - origin[:, None])
        else:
            weights = tl.exp2(scores * scale[:, None] - origin[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        if IS_MASKED:
            shrink = tl.where(new_maximum == float("-inf"), 1.0, shrink)
        maximum = new_maximum
        output *= shrink[:, None]
        if FP8_VALUE:
            total = total * shrink + tl.sum(weights, axis=1) / value_scale
            # Reordering to KEY_ORDER only renames the registers of a thread.
            weights = round_to_fp8(weights).reshape(BLOCK_M, BLOCK_N // 16, 2, 4, 2)
            weights = weights.permute(0, 1, 3, 2, 4).reshape(BLOCK_M, BLOCK_N)
            value = value_desc.load([value_batch, value_key + start])
            if IN_TENSOR_CORES:
                output = tl.dot(weights, value.T, output)
            else:
                output += tl.dot(weights, value.T)
        else:
            total = total * shrink + tl.sum(weights, axis=1)
            value = value_desc.load([value_batch, value_head, value_key + start, 0])
            value = value.reshape(BLOCK_N, BLOCK_DV)
            if IS_MASKED and IS_PART:
                own = start + tl.arange(0, BLOCK_N) < kv_len
                value = tl.where(own[:, None], value, 0.0)
            output = matmul(weights.to(value.dtype), value, output)
    return output, maximum, total


@triton.jit
def _quantise_query(query, IS_INT8: tl.constexpr):
    """Return float32 rows (M, D) quantised to 8 bits, and their scales (M,), which are NaN for rows
    that are not finite."""
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
