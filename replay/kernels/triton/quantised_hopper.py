"""The kernel of `quantised_prefill.py` for Hopper (sm_90), in Gluon: same operands and arithmetic.

Roles as in FlashAttention 3 (Shah et al. 2024): one warp of a program keeps loading blocks of keys
and values through the tensor memory accelerator; two or three warpgroups, 64 queries each, consume
them. A consumer starts the second product of one block and the first of the next together, and
computes while they run what is left of the one before; while it takes exponentials, the tensor
cores serve the other consumers. A program stays on its multiprocessor and works through a list of
tiles, so that the next tile's first keys are there when one is done.

Letters: M = 64 queries of a consumer, N keys of a block, D and Dv padded head dimensions.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from replay.kernels.triton.descriptors import nowhere
from replay.kernels.triton.launch import Launch, PlannedCall, named
from replay.kernels.triton.persistent import (
    SHORT,
    key_blocks,
    multiprocessors,
    place_of,
    section_of,
    tile_number,
    turns_of,
)
from replay.kernels.triton.quantise import GROUP, QuantisedKeyValue, padded_dim

# Its name until Triton 3.6 and after.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)
LOG2_FP8_MAX = gl.constexpr(8.8073549)


@gluon.jit
def _load(
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    FP8_VALUE: gl.constexpr,
    arguments,
):
    """The producer."""
    (
        key_desc, value_desc, key_smem, value_smem, key_full, key_empty, value_full, value_empty,
        tiles, q_blocks, bundles, section, q_heads, kv_heads, kv_len, groups,
    ) = arguments  # fmt: skip
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    count = 0
    for number in range(turns_of(tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        tile = tile_number(number, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)
        bundle, q_block = place_of(tile, q_blocks, bundles, section, IS_CAUSAL)
        head = bundle * HEADS
        batch, kv_head = head // q_heads, head % q_heads // (q_heads // kv_heads)
        at = batch * kv_heads + kv_head
        blocks, _ = key_blocks(q_block * QUERIES, kv_len, QUERIES, BLOCK_N, IS_CAUSAL)
        for block in range(blocks):
            stage, phase = count % STAGES, (count // STAGES) & 1
            start = block * BLOCK_N
            mbarrier.wait(key_empty.index(stage), phase ^ 1)
            mbarrier.expect(key_full.index(stage), key_desc.block_type.nbytes)
            load_tile(
                key_desc,
                [at * groups * GROUP + start, 0],
                key_full.index(stage),
                key_smem.index(stage),
            )
            mbarrier.wait(value_empty.index(stage), phase ^ 1)
            mbarrier.expect(value_full.index(stage), value_desc.block_type.nbytes)
            if FP8_VALUE:
                load_tile(
                    value_desc,
                    [at * BLOCK_DV, start],
                    value_full.index(stage),
                    value_smem.index(stage),
                )
            else:
                load_tile(
                    value_desc,
                    [batch, kv_head, start, 0],
                    value_full.index(stage),
                    value_smem.index(stage),
                )
            count += 1


@gluon.jit
def _quantise_query(
    query_ptr,
    stride_s,
    stride_d,
    first_row,
    q_len,
    factor,
    query_smem,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    SCORES: gl.constexpr,
):
    """A consumer's queries into shared memory; their scales, NaN where a row is not finite."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    query = gl.load(
        query_ptr + rows[:, None].to(gl.int64) * stride_s + columns[None, :] * stride_d,
        mask=(rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    query = query.to(gl.float32) * factor
    not_finite = gl.sum(query * 0.0, 1)
    query = gl.where(gl.abs(query) < float("inf"), query, 0.0)
    largest = gl.maximum(gl.max(gl.abs(query), 1), 1e-12)
    inverse = (1.0 / largest)[:, None]
    if query_smem.dtype == gl.int8:
        quantised = gl.floor(query * inverse * 127.0 + 0.5).to(gl.int8)
        scale = largest / 127.0 + not_finite
    else:
        quantised = (query * inverse * 448.0).to(gl.float8e4nv)
        scale = largest / 448.0 + not_finite
    query_smem.store(quantised)
    fence_async_shared()
    return gl.convert_layout(scale, gl.SliceLayout(1, SCORES))


@gluon.jit
def _weigh(
    scores,
    scale,
    exponent,
    maximum,
    total,
    value_scale,
    first_row,
    block,
    kv_len,
    BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    dtype: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Softmax of one block: weights as the second product wants them, and the running figures."""
    scores = scores.to(gl.float32)
    if IS_MASKED:
        columns = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        is_seen = (columns < kv_len)[None, :]
        if IS_CAUSAL:
            rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            is_seen = is_seen & (columns[None, :] <= rows[:, None])
        scores = gl.where(is_seen, scores * scale[:, None], float("-inf"))
        largest = gl.max(scores, 1)
    else:
        largest = gl.max(scores, 1) * scale
    new_maximum = gl.maximum(maximum, largest + exponent)
    origin = new_maximum - exponent
    if dtype == gl.float8e4nv:
        origin = origin - LOG2_FP8_MAX
    if IS_MASKED:
        weights = gl.exp2(scores - origin[:, None])
    else:
        weights = gl.exp2(scores * scale[:, None] - origin[:, None])
    shrink = gl.exp2(maximum - new_maximum)
    row_sum = gl.sum(weights, 1)
    if dtype == gl.float8e4nv:
        total = total * shrink + row_sum / value_scale
        # Into KEY_ORDER, which for the thread that holds them is a change of names only.
        weights = weights.to(dtype).reshape((ROWS, BLOCK_N // 16, 2, 4, 2))
        weights = weights.permute((0, 1, 3, 2, 4)).reshape((ROWS, BLOCK_N))
    else:
        total = total * shrink + row_sum
        weights = weights.to(dtype)
    return gl.convert_layout(weights, WEIGHTS), new_maximum, total, shrink


@gluon.jit
def _scales(
    key_scale_ptr,
    value_scale_ptr,
    block,
    BLOCK_N: gl.constexpr,
    GROUP: gl.constexpr,
    FP8_VALUE: gl.constexpr,
):
    group = block * BLOCK_N // GROUP
    key_scale = gl.load(key_scale_ptr + group)
    value_scale = gl.load(value_scale_ptr + group) if FP8_VALUE else key_scale
    return key_scale, value_scale


@gluon.jit
def _step(
    scores,
    output,
    maximum,
    total,
    key_scale,
    value_scale,
    query,
    query_scale,
    key_smem,
    value_smem,
    key_full,
    key_empty,
    value_full,
    value_empty,
    turn,
    key_scale_ptr,
    value_scale_ptr,
    count,
    first_row,
    block,
    kv_len,
    WHO: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SCORES: gl.constexpr,
    OUTPUT: gl.constexpr,
    WEIGHTS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_MASKED: gl.constexpr,
    FP8_VALUE: gl.constexpr,
    IN_TURN: gl.constexpr,
    IS_LAST: gl.constexpr,
):
    """One block: its scores are there; leaves those of the next block, unless it is the last."""
    dtype: gl.constexpr = value_smem.dtype
    scale = query_scale * key_scale
    exponent = gl.log2(value_scale) if FP8_VALUE else 0.0
    if not IS_LAST:
        next_key_scale, next_value_scale = _scales(
            key_scale_ptr, value_scale_ptr, block + 1, BLOCK_N, GROUP, FP8_VALUE
        )
    else:
        next_key_scale, next_value_scale = key_scale, value_scale
    weights, maximum, total, shrink = _weigh(
        scores,
        scale,
        exponent,
        maximum,
        total,
        value_scale,
        first_row,
        block,
        kv_len,
        BLOCK_N,
        SCORES,
        WEIGHTS,
        dtype,
        IS_CAUSAL,
        IS_MASKED,
    )
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    stage, phase = count % STAGES, (count // STAGES) & 1
    next_stage, next_phase = (count + 1) % STAGES, ((count + 1) // STAGES) & 1
    mbarrier.wait(value_full.index(stage), phase)
    if IN_TURN:
        mbarrier.wait(turn.index(WHO), count & 1)
    if FP8_VALUE:
        value = value_smem.index(stage).permute((1, 0))
        zero = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUTPUT)
        product = warpgroup_mma(weights, value, zero, use_acc=False, is_async=True)
    else:
        value = value_smem.index(stage).reshape((BLOCK_N, BLOCK_DV))
        product = warpgroup_mma(weights, value, output * shrink, is_async=True)
    if not IS_LAST:
        mbarrier.wait(key_full.index(next_stage), next_phase)
        key = key_smem.index(next_stage).permute((1, 0))
        none = gl.zeros([ROWS, BLOCK_N], scores.dtype, SCORES)
        next_scores = warpgroup_mma(query, key, none, use_acc=False, is_async=True)
        if IN_TURN:
            mbarrier.arrive(turn.index((WHO + 1) % CONSUMERS), count=1)
        product = warpgroup_mma_wait(1, deps=[product])
        mbarrier.arrive(value_empty.index(stage), count=1)
        if FP8_VALUE:
            product = output * shrink + product
        next_scores = warpgroup_mma_wait(0, deps=[next_scores])
        mbarrier.arrive(key_empty.index(next_stage), count=1)
    else:
        if IN_TURN:
            mbarrier.arrive(turn.index((WHO + 1) % CONSUMERS), count=1)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(value_empty.index(stage), count=1)
        if FP8_VALUE:
            product = output * shrink + product
        next_scores = scores
    return next_scores, product, maximum, total, next_key_scale, next_value_scale


@gluon.jit
def _attend(
    WHO: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    FP8_VALUE: gl.constexpr,
    IN_TURN: gl.constexpr,
    arguments,
):
    """Consumer number WHO."""
    (
        query_ptr, stride_b, stride_h, stride_s, stride_d, query_smem, key_smem, value_smem,
        key_full, key_empty, value_full, value_empty, turn, key_scale_ptr, value_scale_ptr,
        output_ptr, tiles, q_blocks, bundles, section, q_heads, kv_heads, q_len, kv_len, groups,
        factor,
    ) = arguments  # fmt: skip
    IS_INT8: gl.constexpr = key_smem.dtype == gl.int8
    score_dtype: gl.constexpr = gl.int32 if IS_INT8 else gl.float32
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_DV, 32 if FP8_VALUE else 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4 if FP8_VALUE else 2)
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STORED: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [gl.num_warps(), 1], [1, 0]
    )
    count = 0
    for number in range(turns_of(tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        tile = tile_number(number, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)
        bundle, q_block = place_of(tile, q_blocks, bundles, section, IS_CAUSAL)
        head = bundle * HEADS + WHO % HEADS
        batch, q_head = head // q_heads, head % q_heads
        at = (batch * kv_heads + q_head // (q_heads // kv_heads)) * groups
        first_row = q_block * QUERIES + WHO // HEADS * ROWS
        blocks, whole = key_blocks(q_block * QUERIES, kv_len, QUERIES, BLOCK_N, IS_CAUSAL)
        key_scale, value_scale = _scales(
            key_scale_ptr + at, value_scale_ptr + at, 0, BLOCK_N, GROUP, FP8_VALUE
        )
        query = query_smem.index(WHO)
        query_scale = _quantise_query(
            query_ptr + batch.to(gl.int64) * stride_b + q_head.to(gl.int64) * stride_h,
            stride_s,
            stride_d,
            first_row,
            q_len,
            factor,
            query,
            HEAD_DIM,
            BLOCK_D,
            SCORES,
        )
        output = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUTPUT)
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        stage = count % STAGES
        mbarrier.wait(key_full.index(stage), (count // STAGES) & 1)
        none = gl.zeros([ROWS, BLOCK_N], score_dtype, SCORES)
        key = key_smem.index(stage).permute((1, 0))
        scores = warpgroup_mma(query, key, none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_empty.index(stage), count=1)
        for block in range(0, whole):
            scores, output, maximum, total, key_scale, value_scale = _step(
                scores, output, maximum, total, key_scale, value_scale,
                query, query_scale, key_smem, value_smem, key_full, key_empty, value_full,
                value_empty, turn, key_scale_ptr + at, value_scale_ptr + at, count, first_row,
                block, kv_len, WHO, GROUP, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, CONSUMERS, SCORES,
                OUTPUT, WEIGHTS, IS_CAUSAL, False, FP8_VALUE, IN_TURN, False,
            )  # fmt: skip
            count += 1
        for block in range(whole, blocks - 1):
            scores, output, maximum, total, key_scale, value_scale = _step(
                scores, output, maximum, total, key_scale, value_scale,
                query, query_scale, key_smem, value_smem, key_full, key_empty, value_full,
                value_empty, turn, key_scale_ptr + at, value_scale_ptr + at, count, first_row,
                block, kv_len, WHO, GROUP, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, CONSUMERS, SCORES,
                OUTPUT, WEIGHTS, IS_CAUSAL, True, FP8_VALUE, IN_TURN, False,
            )  # fmt: skip
            count += 1
        scores, output, maximum, total, key_scale, value_scale = _step(
            scores, output, maximum, total, key_scale, value_scale,
            query, query_scale, key_smem, value_smem, key_full, key_empty, value_full,
            value_empty, turn, key_scale_ptr + at, value_scale_ptr + at, count, first_row,
            blocks - 1, kv_len, WHO, GROUP, BLOCK_N, BLOCK_D, BLOCK_DV, STAGES, CONSUMERS, SCORES,
            OUTPUT, WEIGHTS, IS_CAUSAL, True, FP8_VALUE, IN_TURN, True,
        )  # fmt: skip
        count += 1

        output = output * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUTPUT))[:, None]
        stored = gl.convert_layout(output.to(output_ptr.dtype.element_ty), STORED)
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
        columns = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, STORED))
        gl.store(
            output_ptr
            + head.to(gl.int64) * q_len * V_HEAD_DIM
            + rows[:, None].to(gl.int64) * V_HEAD_DIM
            + columns[None, :],
            stored,
            mask=(rows < q_len)[:, None] & (columns < V_HEAD_DIM)[None, :],
        )


@gluon.jit(
    do_not_specialize=[
        "tiles", "q_blocks", "bundles", "section", "q_heads", "kv_heads", "q_len", "kv_len",
        "groups",
    ]
)  # fmt: skip
def hopper_prefill(
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
    tiles,
    q_blocks,
    bundles,
    section,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
    groups,
    factor,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    FP8_VALUE: gl.constexpr,
    IN_TURN: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`factor` is softmax's scale · log2 e."""
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], key_desc.dtype)
    query_smem = gl.allocate_shared_memory(key_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], QUERY)
    key_smem = gl.allocate_shared_memory(
        key_desc.dtype, [STAGES, BLOCK_N, BLOCK_D], key_desc.layout
    )
    if FP8_VALUE:
        value_smem = gl.allocate_shared_memory(
            value_desc.dtype, [STAGES, BLOCK_DV, BLOCK_N], value_desc.layout
        )
    else:
        value_smem = gl.allocate_shared_memory(
            value_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], value_desc.layout
        )
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(key_full.index(i), count=1)
        mbarrier.init(value_full.index(i), count=1)
        mbarrier.init(key_empty.index(i), count=CONSUMERS)
        mbarrier.init(value_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    if IN_TURN:
        mbarrier.arrive(turn.index(0), count=1)
    load = (
        key_desc, value_desc, key_smem, value_smem, key_full, key_empty, value_full, value_empty,
        tiles, q_blocks, bundles, section, q_heads, kv_heads, kv_len, groups,
    )  # fmt: skip
    attend = (
        query_ptr, stride_b, stride_h, stride_s, stride_d, query_smem, key_smem, value_smem,
        key_full, key_empty, value_full, value_empty, turn, key_scale_ptr, value_scale_ptr,
        output_ptr, tiles, q_blocks, bundles, section, q_heads, kv_heads, q_len, kv_len, groups,
        factor,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (1, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_load, (GROUP, BLOCK_N, BLOCK_DV, STAGES, CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE,
                         load)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (0, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (1, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (2, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_load, (GROUP, BLOCK_N, BLOCK_DV, STAGES, CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE,
                         load)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (0, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (1, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (2, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_attend, (3, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, GROUP, BLOCK_N, STAGES,
                                CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE, IN_TURN, attend)),
                (_load, (GROUP, BLOCK_N, BLOCK_DV, STAGES, CONSUMERS, HEADS, IS_CAUSAL, FP8_VALUE,
                         load)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


class Tile(NamedTuple):
    """What a program works on at a time, and with what."""

    consumers: int
    heads: int
    """Query heads of one group side by side; divides the consumers."""
    keys: int
    stages: int
    registers: int
    """Registers of a consumer's thread; with 24 of a producer's they must fill 65536."""
    in_turn: bool
    """Whether consumers give the tensor cores to each other in a fixed order."""


def tile_for(head_dim: int, group: int, kv_len: int) -> Tile:
    """The tile for a padded head dimension and `group` query heads a key head, as measured on an
    H200 (docs/notes.md)."""
    if head_dim > 64:
        return Tile(2, 1, 128, 2, 240, True)
    if kv_len <= SHORT:
        return Tile(4, math.gcd(group, 4), 64, 4, 112, False)
    return Tile(3, 1, 128, 3, 160, False)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    dtypes = {
        torch.int8: gl.int8,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
    }
    return gl.NVMMASharedLayout.get_default_for(list(block), dtypes[dtype])


def _descriptor(tensor: Tensor, strides: list[int], *block: int) -> TensorDescriptor:
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block), layout)


def plan(
    query: Tensor,
    quantised: QuantisedKeyValue,
    value: Tensor,
    value_strides: list[int],
    is_causal: bool,
    factor: float,
    tile: Tile | None = None,
) -> PlannedCall:
    """All of a call but its tensors' addresses.

    `value` and its strides are as a tensor descriptor takes them; the output is contiguous.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_rows, block_dim = quantised.key.shape[1:]
    fp8_value = quantised.value_scale is not None
    block_v_dim = padded_dim(quantised.v_head_dim)
    group = q_heads // kv_heads
    tile = tile or tile_for(max(block_dim, block_v_dim), group, quantised.kv_len)
    key = quantised.key.view(-1, block_dim)
    key_desc = _descriptor(key, [block_dim, 1], tile.keys, block_dim)
    if fp8_value:
        value_desc = _descriptor(value.view(-1, kv_rows), [kv_rows, 1], block_v_dim, tile.keys)
    else:
        value_desc = _descriptor(value, value_strides, 1, 1, tile.keys, block_v_dim)
    q_blocks = -(-q_len // (tile.consumers // tile.heads * ROWS.value))
    bundles = batch * q_heads // tile.heads
    tiles = q_blocks * bundles
    head_bytes = kv_rows * (block_dim + block_v_dim * value.element_size())
    launch = Launch(
        hopper_prefill,
        (min(tiles, multiprocessors(query.device)), 1, 1),
        query.device,
        named("stride_", "bhsd", query.stride())
        | {
            "tiles": tiles,
            "q_blocks": q_blocks,
            "bundles": bundles,
            "section": section_of(head_bytes, bundles, group // tile.heads, is_causal),
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
            "GROUP": GROUP,
            "BLOCK_N": tile.keys,
            "STAGES": tile.stages,
            "CONSUMERS": tile.consumers,
            "HEADS": tile.heads,
            "IS_CAUSAL": is_causal,
            "FP8_VALUE": fp8_value,
            "IN_TURN": tile.in_turn,
            "REGISTERS": tile.registers,
        },
        num_warps=4,
    )
    return PlannedCall(launch, (nowhere(key_desc), nowhere(value_desc)))
