"""The kernel of `quantised_prefill.py` for Hopper (sm_90), in Gluon: same operands and arithmetic.

Roles as in FlashAttention 3 and `prefill_hopper_kernel.py`: one warp of a program keeps loading
blocks of keys and values, and two to four warp groups, 64 queries each, consume them
(`hopper_pipeline.py`). A consumer quantises its own queries. It starts PV of one block and QKᵀ of
the next together, and computes while they run what is left of the one before (`_step`); while it
takes exponentials, the tensor cores serve the other consumers. A program stays on its
multiprocessor and works through a list of tiles (`persistent.py`), so that the next tile's first
keys are there when one is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import PropagateNan

from replay.kernels.triton.hopper_pipeline import (
    KEY,
    LOADER_REGISTERS,
    VALUE,
    buffer_of,
    fill,
    fill_shared,
    make_ring,
    make_shared_ring,
    meet_after,
    pass_turn,
    release,
    release_shared,
    tma_store,
    wait_for,
    wait_for_turn_after,
)
from replay.kernels.triton.hopper_scores import ROWS, may_see, own_sums, start_scores
from replay.kernels.triton.persistent import Work, key_blocks, tile_of, turns_of
from replay.kernels.triton.quantise import FP8_MAX, GROUP, INT8_MAX, LOG2_FP8_MAX, SMALLEST_MAXIMUM

ALL = gl.constexpr(PropagateNan.ALL)
LOG2 = gl.constexpr("lg2.approx.ftz.f32")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32")
SCALE_GROUP = gl.constexpr(GROUP)
"""Keys, and values, that share a scale."""


class Rings(NamedTuple):
    """Blocks on their way from the producer to the consumers."""

    query: Any
    """One buffer for each consumer, (1, 1, ROWS, D) in 16 bits."""
    key: Any
    """STAGES of (KEYS, D)."""
    value: Any
    """STAGES of (1, 1, KEYS, Dv), or in FP8, where they are transposed, of (Dv, KEYS)."""


@gluon.jit(
    do_not_specialize=[
        "tiles", "blocks", "bundles", "section", "q_heads", "kv_heads", "q_len", "kv_len", "groups"
    ]
)  # fmt: skip
def quantised_hopper_kernel(
    query_desc,
    key_desc,
    key_scale_ptr,
    value_desc,
    value_scale_ptr,
    output_desc,
    tiles,
    blocks,
    bundles,
    section,
    q_heads,
    kv_heads,
    q_len,
    kv_len,
    groups,
    factor,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A persistent program: its shared memory, and who does what.

    `factor` is softmax's scale · log2 e, `groups` are the scales of a key head. Not IN_TURN, each
    consumer starts its products when it can. IN_TENSOR_CORES: as in the portable kernel.
    """
    D: gl.constexpr = key_desc.block_type.shape[1]
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], key_desc.dtype)
    queries = gl.allocate_shared_memory(key_desc.dtype, [CONSUMERS, ROWS, D], QUERY)
    k_shape: gl.constexpr = [STAGES] + key_desc.block_type.shape  # noqa: RUF005 (none in Gluon)
    v_shape: gl.constexpr = [STAGES] + value_desc.block_type.shape  # noqa: RUF005
    k_buffers = gl.allocate_shared_memory(key_desc.dtype, k_shape, key_desc.layout)
    v_buffers = gl.allocate_shared_memory(value_desc.dtype, v_shape, value_desc.layout)
    q_shape: gl.constexpr = [CONSUMERS] + query_desc.block_type.shape  # noqa: RUF005
    q_buffers = gl.allocate_shared_memory(query_desc.dtype, q_shape, query_desc.layout)
    o_shape: gl.constexpr = [CONSUMERS] + output_desc.block_type.shape  # noqa: RUF005
    o_buffers = gl.allocate_shared_memory(output_desc.dtype, o_shape, output_desc.layout)
    rings = Rings(
        make_ring(q_buffers),
        make_shared_ring(k_buffers, CONSUMERS),
        make_shared_ring(v_buffers, CONSUMERS),
    )
    if IN_TURN:
        pass_turn(CONSUMERS - 1, CONSUMERS)  # so the first consumer's is the first
    work = Work(q_heads, q_len, kv_len, tiles, blocks, bundles, section)
    scales = (key_scale_ptr, value_scale_ptr, kv_heads, groups)
    load = (query_desc, key_desc, value_desc, rings, work, kv_heads, groups)
    attend = (queries, rings, scales, (o_buffers, output_desc), work, factor)
    # The first consumer is the program's own four warps. Gluon wants every list written out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, IS_CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 2, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, IS_CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 2, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 3, HEADS, IS_CAUSAL, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, IS_CAUSAL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _load(arguments, CONSUMERS: gl.constexpr, HEADS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The loading warp: all blocks of all tiles, as soon as there is room."""
    query_desc, key_desc, value_desc, rings, work, kv_heads, groups = arguments
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    count = 0  # key blocks so far, of all tiles
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        head, block = tile_of(turn, work, HEADS, IS_CAUSAL)
        batch, q_head = head // work.q_heads, head % work.q_heads
        kv_head = q_head // (work.q_heads // kv_heads)
        for who in gl.static_range(CONSUMERS):
            row = block * QUERIES + who // HEADS * ROWS
            fill(rings.query, query_desc, [batch, q_head + who % HEADS, row, 0], who, turn)
        at = batch * kv_heads + kv_head
        blocks, _ = key_blocks(block * QUERIES, work.kv_len, QUERIES, KEYS, IS_CAUSAL)
        for i in range(blocks):
            key = i * KEYS
            stage, phase = buffer_of(count, STAGES)
            place = [at * groups * SCALE_GROUP + key, 0]
            fill_shared(rings.key, key_desc, place, stage, phase, KEY, CONSUMERS)
            if value_desc.dtype == gl.float8e4nv:
                DV: gl.constexpr = value_desc.block_type.shape[0]
                place = [at * DV, key]
                fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
            else:
                place = [batch, kv_head, key, 0]
                fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
            count += 1


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
):
    """Consumer number WHO: 64 queries of every tile."""
    queries, rings, scales, outputs, work, factor = arguments
    o_buffers, output_desc = outputs
    key_scale_ptr, value_scale_ptr, kv_heads, groups = scales
    kv_len = work.kv_len
    CONSUMERS: gl.constexpr = queries.shape[0]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    DV: gl.constexpr = rings.value.buffers.shape[1 if FP8_VALUE else 4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DV, 32 if FP8_VALUE else 16]
    )
    count = 0
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        wait_for(rings.query, WHO, turn)
        # What it takes to find the tile hides behind what the query takes.
        head, block = tile_of(turn, work, HEADS, IS_CAUSAL)
        head += WHO % HEADS
        batch, q_head = head // work.q_heads, head % work.q_heads
        at = batch * kv_heads + q_head // (work.q_heads // kv_heads)
        first = block * QUERIES + WHO // HEADS * ROWS
        blocks, whole = key_blocks(block * QUERIES, kv_len, QUERIES, KEYS, IS_CAUSAL)
        of_head = (key_scale_ptr + at * groups, value_scale_ptr + at * groups)
        of_keys, of_values = _scales(of_head, 0, KEYS, FP8_VALUE)
        query = queries.index(WHO)
        of_queries = _quantise_query(rings.query.buffers.index(WHO), factor, query, SCORES)
        release(rings.query, WHO)

        stage, phase = buffer_of(count, STAGES)
        wait_for(rings.key, stage, phase)
        scores = start_scores(query, rings.key.buffers.index(stage))
        scores = warpgroup_mma_wait(0, deps=[scores])
        release_shared(rings.key, stage, KEY, CONSUMERS)
        output = gl.zeros([ROWS, DV], gl.float32, OUTPUT)
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = own_sums(gl.zeros([ROWS, KEYS], gl.float32, SCORES))
        state = (scores, output, maximum, total, of_keys, of_values)
        # Blocks that all queries see whole, if causal those that some do not, and the last.
        for i in range(0, whole):
            state = _step(
                state, query, of_queries, rings, of_head, count, first, i, kv_len,
                WHO, CONSUMERS, IS_CAUSAL, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            count += 1
        if IS_CAUSAL:
            for i in range(whole, blocks - 1):
                state = _step(
                    state, query, of_queries, rings, of_head, count, first, i, kv_len,
                    WHO, CONSUMERS, IS_CAUSAL, True, IN_TURN, IN_TENSOR_CORES, False,
                )  # fmt: skip
                count += 1
        state = _step(
            state, query, of_queries, rings, of_head, count, first, blocks - 1, kv_len,
            WHO, CONSUMERS, IS_CAUSAL, True, IN_TURN, IN_TENSOR_CORES, True,
        )  # fmt: skip
        count += 1

        _, output, _, sums, _, _ = state
        output = (
            output * gl.convert_layout(1.0 / gl.sum(sums, 1), gl.SliceLayout(1, OUTPUT))[:, None]
        )
        o_buffer = o_buffers.index(WHO)
        tma.store_wait(0)  # that of the tile before, which still reads this memory
        o_buffer.reshape((ROWS, DV)).store(output.to(o_buffer.dtype))
        fence_async_shared()
        tma_store(output_desc, [batch, q_head, first, 0], o_buffer)
    tma.store_wait(0)


@gluon.jit
def _step(
    state,
    query,
    of_queries,
    rings,
    scales,
    count,
    first_query,
    block,
    kv_len,
    WHO: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_MASKED: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    IS_LAST: gl.constexpr,
):
    """Block number `count`, whose scores are there: its softmax, and PV beside QKᵀ of the next.

    Leaves the scores and the scales of the next block, unless it is a tile's last.
    """
    scores, output, maximum, total, of_keys, of_values = state
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    OUTPUT: gl.constexpr = output.type.layout
    scale = of_queries * of_keys
    exponent = _approximately(LOG2, of_values) if FP8_VALUE else 0.0
    next_of_keys, next_of_values = of_keys, of_values
    if not IS_LAST:
        next_of_keys, next_of_values = _scales(scales, block + 1, KEYS, FP8_VALUE)
    weights, maximum, total, shrink = _weigh(
        scores, scale, exponent, of_values, maximum, total, first_query, block, kv_len,
        OUTPUT, rings.value.buffers.dtype, IS_CAUSAL, IS_MASKED,
    )  # fmt: skip
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]

    stage, phase = buffer_of(count, STAGES)
    next_stage, next_phase = buffer_of(count + 1, STAGES)
    if not IN_TURN:
        meet_after(total, WHO)
    wait_for(rings.value, stage, phase)
    if not IS_LAST:
        wait_for(rings.key, next_stage, next_phase)
    if IN_TURN:
        wait_for_turn_after(total, WHO)
    values = rings.value.buffers.index(stage)
    values = values.permute((1, 0)) if FP8_VALUE else values.reshape((KEYS, output.shape[1]))
    if FP8_VALUE and not IN_TENSOR_CORES:
        nothing = gl.zeros(output.shape, gl.float32, OUTPUT)
        product = warpgroup_mma(weights, values, nothing, use_acc=False, is_async=True)
    else:
        product = warpgroup_mma(weights, values, output * shrink, is_async=True)
    next_scores = scores
    if not IS_LAST:
        next_scores = start_scores(query, rings.key.buffers.index(next_stage))
    if IN_TURN:
        pass_turn(WHO, CONSUMERS)
    product = warpgroup_mma_wait(0 if IS_LAST else 1, deps=[product])
    release_shared(rings.value, stage, VALUE, CONSUMERS)
    if FP8_VALUE and not IN_TENSOR_CORES:
        product = output * shrink + product
    if not IS_LAST:
        next_scores = warpgroup_mma_wait(0, deps=[next_scores])
        release_shared(rings.key, next_stage, KEY, CONSUMERS)
    return next_scores, product, maximum, total, next_of_keys, next_of_values


@gluon.jit
def _weigh(
    scores,
    scale,
    exponent,
    of_values,
    maximum,
    total,
    first_query,
    block,
    kv_len,
    OUTPUT: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Softmax of one block: its weights, as PV in the layout OUTPUT wants them, and the running
    maximum and sum with the factor for what was summed before."""
    FP8_VALUE: gl.constexpr = DTYPE == gl.float8e4nv  # noqa: SIM300
    KEYS: gl.constexpr = scores.shape[1]
    scores = scores.to(gl.float32)
    if IS_MASKED:
        seen = may_see(scores, first_query, block * KEYS, kv_len, IS_CAUSAL)
        scores = gl.where(seen, scores * scale[:, None], float("-inf"))
        largest = gl.max(scores, 1)
    else:
        # No scale is negative, so that the largest product is the largest score.
        largest = gl.max(scores, 1) * scale
    new_maximum = gl.maximum(maximum, largest + exponent)
    origin = new_maximum - exponent
    if FP8_VALUE:
        origin = origin - LOG2_FP8_MAX
    if IS_MASKED:
        weights = gl.exp2(scores - origin[:, None])
    else:
        weights = gl.exp2(scores * scale[:, None] - origin[:, None])
    shrink = gl.exp2(maximum - new_maximum)
    sums = own_sums(weights)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
    if FP8_VALUE:
        total = total + sums * _approximately(RECIPROCAL, of_values)
        # Into KEY_ORDER, which for the thread that holds them is a change of names only.
        weights = weights.to(DTYPE).reshape((ROWS, KEYS // 16, 2, 4, 2))
        weights = weights.permute((0, 1, 3, 2, 4)).reshape((ROWS, KEYS))
    else:
        total = total + sums
        weights = weights.to(DTYPE)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 4 if FP8_VALUE else 2)
    return gl.convert_layout(weights, WEIGHTS), new_maximum, total, shrink


@gluon.jit
def _approximately(INSTRUCTION: gl.constexpr, number):
    """The GPU's own logarithm or reciprocal, to some 22 bits, instead of one that takes 20 more
    instructions for the last bit and for numbers below 1e-38."""
    PTX: gl.constexpr = INSTRUCTION + " $0, $1;"
    return gl.inline_asm_elementwise(PTX, "=f,f", [number], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _scales(scales, block, KEYS: gl.constexpr, FP8_VALUE: gl.constexpr):
    """A block's scales of keys and of values; values of 16 bits have none."""
    key_scale_ptr, value_scale_ptr = scales
    group = block * KEYS // SCALE_GROUP
    of_keys = gl.load(key_scale_ptr + group)
    of_values = gl.load(value_scale_ptr + group) if FP8_VALUE else of_keys
    return of_keys, of_values


@gluon.jit
def _quantise_query(block, factor, buffer, SCORES: gl.constexpr):
    """A consumer's queries into shared memory; their scales, NaN where a row is not finite."""
    D: gl.constexpr = buffer.shape[1]
    query = block.reshape((ROWS, D)).load(_four_threads_a_row(D)).to(gl.float32)
    largest = gl.reduce(gl.abs(query), 1, _larger_or_nan) * gl.abs(factor)
    not_finite = largest * 0.0
    largest = gl.maximum(largest, SMALLEST_MAXIMUM)
    if buffer.dtype == gl.int8:
        query = gl.floor(query * (factor * INT8_MAX / largest)[:, None] + 0.5)
        scale = largest / INT8_MAX + not_finite
    else:
        query = query * (factor * FP8_MAX / largest)[:, None]
        scale = largest / FP8_MAX + not_finite
    buffer.store(query.to(buffer.dtype))
    fence_async_shared()
    return gl.convert_layout(scale, gl.SliceLayout(1, SCORES), assert_trivial=True)


@gluon.jit
def _larger_or_nan(left, right):
    return gl.maximum(left, right, propagate_nan=ALL)


@constexpr_function
def _four_threads_a_row(D):
    """The layout of (ROWS, D) queries in which a thread has the rows that it has of scores.

    Its columns are such that eight threads, which read 16 bytes each at a time, find them in
    different banks of shared memory as TMA lays out 16 bits.
    """
    columns = [[0, 1 << bit] for bit in range(D.bit_length() - 1)]
    quad = 4 if D >= 64 else 3  # the bits of columns that tell a row's four threads apart
    lanes = [*columns[quad : quad + 2], [1, 0], [2, 0], [4, 0]]
    registers = [*columns[:quad], *columns[quad + 2 :], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, D])
