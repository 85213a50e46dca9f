"""The kernel of `quantised_prefill.py` for Hopper (sm_90), in Gluon: same operands and arithmetic.

Roles as in FlashAttention 3 and `prefill_hopper_kernel.py`: one warp of a program keeps loading
blocks of keys and values, and two to four warp groups, 64 queries each, consume them
(`hopper_pipeline.py`). A consumer quantises its own queries. It starts PV of one block and QKᵀ of
the next together, and computes while they run what is left of the one before (`_step`); while it
takes exponentials, the tensor cores serve the other consumers. A program stays on its
multiprocessor and works through a list of tiles (`persistent.py`), so that the next tile's first
keys are there when one is done.

Keys are visited from the first to the last, and of those that a mask cuts, a window's left side has
the first (`hopper_spans.py`).
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
from replay.kernels.triton.hopper_scores import ROWS, add_sink, own_sums, soft_cap, start_scores
from replay.kernels.triton.hopper_spans import Bounds, key_blocks_of, sees, span_of
from replay.kernels.triton.online_softmax import LOG2_E
from replay.kernels.triton.persistent import Work, tile_of, turns_of
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


class Extras(NamedTuple):
    """What scores are made of beside operands; None where a call asks for nothing."""

    factor: Any
    """Softmax's scale · log2 e, or with a cap that of the exponent in tanh."""
    cap: Any
    key_mean: Any
    """(B, Hkv, D), what was subtracted from the keys, where a cap or a sink must know."""
    sinks: Any
    """(Hq,)."""


class Rows(NamedTuple):
    """A consumer's queries of a tile."""

    query: Any
    """(ROWS, D) in 8 bits, in shared memory."""
    scale: Any
    """(ROWS,), and with softmax's own."""
    shift: Any
    """(ROWS,), what the mean of the keys would add to scores, or None."""
    first: Any


@gluon.jit(
    do_not_specialize=[
        "tiles", "blocks", "bundles", "section", "q_heads", "group", "q_len", "kv_len", "diagonal",
        "left", "right", "groups",
    ]
)  # fmt: skip
def quantised_hopper_kernel(
    query_desc,
    key_desc,
    key_scale_ptr,
    value_desc,
    value_scale_ptr,
    output_desc,
    key_mean_ptr,
    sinks_ptr,
    tiles,
    blocks,
    bundles,
    section,
    q_heads,
    group,
    q_len,
    kv_len,
    diagonal,
    left,
    right,
    groups,
    factor,
    cap,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """A persistent program: its shared memory, and who does what.

    `group` are the query heads of a key head, `groups` its scales. What a call lacks is None, and
    no argument of the compiled program: `diagonal` (as in `Bounds`), `left`, `right`, `cap`, sinks
    and the mean of the keys. BY_LENGTH: tiles differ in length, and are worked on from the longest.
    Not IN_TURN, each consumer starts its products when it can. IN_TENSOR_CORES: as in the portable
    kernel.
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
    bounds = Bounds(q_len, kv_len, diagonal, left, right)
    work = Work(q_heads, tiles, blocks, bundles, section)
    scales = (key_scale_ptr, value_scale_ptr, group, groups)
    extras = Extras(factor, cap, key_mean_ptr, sinks_ptr)
    load = (query_desc, key_desc, value_desc, rings, work, bounds, group, groups)
    attend = (queries, rings, scales, (o_buffers, output_desc), work, bounds, extras)
    # The first consumer is the program's own four warps. Gluon wants every list written out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_attend, (attend, 3, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _load(arguments, CONSUMERS: gl.constexpr, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr):
    """The loading warp: all blocks of all tiles, as soon as there is room."""
    query_desc, key_desc, value_desc, rings, work, bounds, group, groups = arguments
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    span = span_of(0, bounds)
    count = 0  # key blocks so far, of all tiles
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), BY_LENGTH)):
        head, block = tile_of(turn, work, HEADS, BY_LENGTH)
        batch, q_head = head // work.q_heads, head % work.q_heads
        for who in gl.static_range(CONSUMERS):
            row = block * QUERIES + who // HEADS * ROWS
            fill(rings.query, query_desc, [batch, q_head + who % HEADS, row, 0], who, turn)
        at = head // group
        begin, _, _, end = key_blocks_of(block * QUERIES, span, bounds, QUERIES, KEYS)
        for i in range(begin, end):
            key = i * KEYS
            stage, phase = buffer_of(count, STAGES)
            place = [at * groups * SCALE_GROUP + key, 0]
            fill_shared(rings.key, key_desc, place, stage, phase, KEY, CONSUMERS)
            if value_desc.dtype == gl.float8e4nv:
                DV: gl.constexpr = value_desc.block_type.shape[0]
                place = [at * DV, key]
                fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
            else:
                place = [batch, q_head // group, key, 0]
                fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
            count += 1


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
):
    """Consumer number WHO: 64 queries of every tile."""
    queries, rings, scales, outputs, work, bounds, extras = arguments
    o_buffers, output_desc = outputs
    key_scale_ptr, value_scale_ptr, group, groups = scales
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
    span = span_of(0, bounds)
    count = 0
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), BY_LENGTH)):
        wait_for(rings.query, WHO, turn)
        # What it takes to find the tile hides behind what the query takes.
        head, block = tile_of(turn, work, HEADS, BY_LENGTH)
        head += WHO % HEADS
        batch, q_head = head // work.q_heads, head % work.q_heads
        at = head // group
        first = block * QUERIES + WHO // HEADS * ROWS
        begin, whole_first, whole_end, end = key_blocks_of(
            block * QUERIES, span, bounds, QUERIES, KEYS
        )
        of_head = (key_scale_ptr + at * groups, value_scale_ptr + at * groups)
        of_keys, of_values = _scales(of_head, begin, KEYS, FP8_VALUE)
        query = queries.index(WHO)
        unquantised = rings.query.buffers.index(WHO)
        shift = None
        if extras.key_mean is not None:
            D: gl.constexpr = query.shape[1]
            shift = _times_mean(unquantised, extras.key_mean + at * D, extras.factor, D, SCORES)
        of_queries = _quantise_query(unquantised, extras.factor, query, SCORES)
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
        rows = Rows(query, of_queries, shift, first)
        # Blocks that a window's left side cuts, those that all queries see whole, those that the
        # diagonal or its right side cuts, and the last. Without a right side all before the last
        # are seen whole to their ends.
        if bounds.left is not None:
            for i in range(begin, whole_first):
                state = _step(
                    state, rows, rings, of_head, count, i, span, bounds, extras.cap,
                    WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
                )  # fmt: skip
                count += 1
        for i in range(whole_first, whole_end):
            state = _step(
                state, rows, rings, of_head, count, i, span, bounds, extras.cap,
                WHO, CONSUMERS, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            count += 1
        if bounds.right is not None:
            for i in range(whole_end, end - 1):
                state = _step(
                    state, rows, rings, of_head, count, i, span, bounds, extras.cap,
                    WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
                )  # fmt: skip
                count += 1
        state = _step(
            state, rows, rings, of_head, count, end - 1, span, bounds, extras.cap,
            WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, True,
        )  # fmt: skip
        count += 1

        _, output, maximum, sums, _, _ = state
        total = gl.sum(sums, 1)
        rescale = 1.0
        if extras.sinks is not None:
            sink = gl.load(extras.sinks + q_head).to(gl.float32) * LOG2_E
            if extras.key_mean is not None and extras.cap is None:
                sink = sink - gl.convert_layout(shift, total.type.layout)
            maximum = gl.convert_layout(maximum, total.type.layout)
            LOG2_UNIT: gl.constexpr = LOG2_FP8_MAX if FP8_VALUE else 0.0
            rescale, _, total = add_sink(sink, maximum, total, LOG2_UNIT)
        share = gl.where(total == 0.0, 0.0, rescale / total)  # a query may see nothing
        output *= gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
        o_buffer = o_buffers.index(WHO)
        tma.store_wait(0)  # that of the tile before, which still reads this memory
        o_buffer.reshape((ROWS, DV)).store(output.to(o_buffer.dtype))
        fence_async_shared()
        tma_store(output_desc, [batch, q_head, first, 0], o_buffer)
    tma.store_wait(0)


@gluon.jit
def _step(
    state,
    rows,
    rings,
    scales,
    count,
    block,
    span,
    bounds,
    cap,
    WHO: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_MASKED: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    IS_LAST: gl.constexpr,
):
    """Block number `count`, whose scores are there: its softmax, and PV beside QKᵀ of the next.

    Leaves the scores and the scales of the next block, unless it is a tile's last. `block` is its
    number among those of the key head.
    """
    scores, output, maximum, total, of_keys, of_values = state
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    OUTPUT: gl.constexpr = output.type.layout
    scale = rows.scale * of_keys
    exponent = _approximately(LOG2, of_values) if FP8_VALUE else 0.0
    next_of_keys, next_of_values = of_keys, of_values
    if not IS_LAST:
        next_of_keys, next_of_values = _scales(scales, block + 1, KEYS, FP8_VALUE)
    weights, maximum, total, shrink = _weigh(
        scores, scale, rows, exponent, of_values, maximum, total, block, span, bounds, cap,
        OUTPUT, rings.value.buffers.dtype, IS_MASKED,
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
        next_scores = start_scores(rows.query, rings.key.buffers.index(next_stage))
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
    rows,
    exponent,
    of_values,
    maximum,
    total,
    block,
    span,
    bounds,
    cap,
    OUTPUT: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Softmax of one block: its weights, as PV in the layout OUTPUT wants them, and the running
    maximum and sum with the factor for what was summed before."""
    FP8_VALUE: gl.constexpr = DTYPE == gl.float8e4nv  # noqa: SIM300
    KEYS: gl.constexpr = scores.shape[1]
    scores = scores.to(gl.float32)
    if IS_MASKED or cap is not None:
        scores *= scale[:, None]
        if cap is not None:
            if rows.shift is not None:
                scores += rows.shift[:, None]
            scores = soft_cap(scores, cap)
        if IS_MASKED:
            seen = sees(scores, rows.first, block * KEYS, span, bounds)
            scores = gl.where(seen, scores, float("-inf"))
        largest = gl.max(scores, 1)
    else:
        # No scale is negative, so that the largest product is the largest score.
        largest = gl.max(scores, 1) * scale
    new_maximum = gl.maximum(maximum, largest + exponent)
    subtracted = new_maximum
    if IS_MASKED and (bounds.left is not None or bounds.diagonal is None):
        # A row that has seen no key yet: -inf minus itself would be NaN.
        subtracted = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    origin = subtracted - exponent
    if FP8_VALUE:
        origin = origin - LOG2_FP8_MAX
    if IS_MASKED or cap is not None:
        weights = gl.exp2(scores - origin[:, None])
    else:
        weights = gl.exp2(scores * scale[:, None] - origin[:, None])
    shrink = gl.exp2(maximum - subtracted)
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
def _times_mean(block, mean_ptr, factor, D: gl.constexpr, SCORES: gl.constexpr):
    """What the mean that was subtracted from the keys would add to a row's scores."""
    LAYOUT: gl.constexpr = _four_threads_a_row(D)
    query = block.reshape((ROWS, D)).load(LAYOUT).to(gl.float32)
    mean = gl.load(mean_ptr + gl.arange(0, D, gl.SliceLayout(0, LAYOUT)))
    products = gl.sum(query * mean[None, :], 1) * factor
    return gl.convert_layout(products, gl.SliceLayout(1, SCORES), assert_trivial=True)


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
