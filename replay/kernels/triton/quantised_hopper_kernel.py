"""The kernel of `quantised_prefill.py` for Hopper (sm_90), in Gluon: same operands and arithmetic.

Roles as in FlashAttention 3 and `prefill_hopper_kernel.py`: one warp of a program keeps loading
blocks of keys and values, and two to four warp groups, 64 queries each, consume them
(`hopper_pipeline.py`). A consumer quantises its own queries. It starts PV of one block and QKᵀ of
the next together, and computes while they run what is left of the one before (`_step`); while it
takes exponentials, the tensor cores serve the other consumers. A program stays on its
multiprocessor and works through a list of tiles (`persistent.py`), so that the next tile's first
keys are there when one is done.

Keys are visited from the first to the last, and of those that a mask cuts, a window's left side has
the first (`hopper_spans.py`). A given mask leaves lists of blocks: those that it cuts come last.
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

from replay.kernels.triton.hopper_masks import fill_mask, hide
from replay.kernels.triton.hopper_pipeline import (
    KEY,
    LOADER_REGISTERS,
    VALUE,
    buffer_of,
    clear,
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
from replay.kernels.triton.hopper_scores import (
    ROWS,
    add_sink,
    matrix,
    own_sums,
    start_scores,
)
from replay.kernels.triton.hopper_spans import (
    Bounds,
    element_of,
    hide_unseen,
    key_blocks_of,
    span_of,
    store_rows,
    tile_exists,
    visited_key,
    visits_of,
)
from replay.kernels.triton.online_softmax import LOG2_E
from replay.kernels.triton.persistent import Work, tile_of, turns_of
from replay.kernels.triton.quantise import (
    FP8_MAX,
    GROUP,
    INT8_MAX,
    LOG2_FP8_MAX,
    SMALLEST_MAXIMUM,
    first_group,
)

ALL = gl.constexpr(PropagateNan.ALL)
LOG2 = gl.constexpr("lg2.approx.ftz.f32")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32")
TANH = gl.constexpr("tanh.approx.f32")
"""To some 11 bits: beside scores of 8 bits that is little, and of three special functions a score,
which a soft cap waits for, it leaves two."""
SCALE_GROUP = gl.constexpr(GROUP)
"""Keys, and values, that share a scale."""
MASK_STAGES = gl.constexpr(2)
"""Blocks of the mask that each consumer has room for."""


class Rings(NamedTuple):
    """Blocks on their way from the producer to the consumers."""

    query: Any
    """One buffer for each consumer, (1, 1, ROWS, D) in 16 bits."""
    key: Any
    """STAGES of (KEYS, D)."""
    value: Any
    """STAGES of (1, 1, KEYS, Dv), or in FP8, where they are transposed, of (Dv, KEYS)."""
    mask: Any
    """MASK_STAGES buffers for each consumer, (1, 1, ROWS, KEYS / 2) uint16, of which each is two
    bytes of a bool mask; None where a call has none."""


class Extras(NamedTuple):
    """What scores are made of beside operands; None where a call asks for nothing."""

    factor: Any
    """Softmax's scale · log2 e, or with a cap what is tanh's argument per product."""
    cap: Any
    """Times log2 e."""
    key_mean: Any
    """(B, Hkv, D), what was subtracted from the keys, where a cap or a sink must know."""
    sinks: Any
    """(Hq,)."""


class Kept(NamedTuple):
    """Where a tile's keys and values are kept in 8 bits."""

    head: Any
    """Of keys, counted over the tensors' batch."""
    group: Any
    """The first of its batch element among the head's."""


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
        "left", "right", "groups", "mask_batch", "mask_head", "visit_batch", "visit_head",
    ]
)  # fmt: skip
def quantised_hopper_kernel(
    query_desc,
    key_desc,
    key_scale_ptr,
    value_desc,
    value_scale_ptr,
    output,
    key_mean_ptr,
    sinks_ptr,
    mask_desc,
    q_offsets_ptr,
    k_starts_ptr,
    k_lengths_ptr,
    visited_ptr,
    visit_counts_ptr,
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
    mask_batch,
    mask_head,
    visit_batch,
    visit_head,
    stride_output_head,
    stride_output_token,
    factor,
    cap,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    REGISTERS: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """A persistent program: its shared memory, and who does what.

    `group` are the query heads of a key head, `groups` its scales. What a call lacks is None, and
    no argument of the compiled program: `diagonal` (as in `Bounds`), `left`, `right`, `cap`, sinks,
    the mean of the keys, lengths, and the mask with what it leaves (`Visits`), of which
    `mask_batch` and `mask_head` are 1, or 0 where all share its only one. `output` is a descriptor,
    or of a packed call, where a tile may end amid another sequence's rows, a pointer. BY_LENGTH:
    tiles differ in length, and are worked on from the longest. Not IN_TURN, each consumer starts
    its products when it can. IN_TENSOR_CORES: as in the portable kernel.
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
    DV: gl.constexpr = value_desc.block_type.shape[0 if value_desc.dtype == gl.float8e4nv else 3]
    o_shape: gl.constexpr = [CONSUMERS, 1, 1, ROWS, DV]
    OUTPUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, DV], query_desc.dtype)
    o_buffers = gl.allocate_shared_memory(query_desc.dtype, o_shape, OUTPUT)
    mask = None
    if mask_desc is not None:
        m_shape: gl.constexpr = [CONSUMERS * MASK_STAGES] + mask_desc.block_type.shape  # noqa: RUF005
        m_buffers = gl.allocate_shared_memory(mask_desc.dtype, m_shape, mask_desc.layout)
        mask = make_ring(m_buffers)
    rings = Rings(
        make_ring(q_buffers),
        make_shared_ring(k_buffers, CONSUMERS),
        make_shared_ring(v_buffers, CONSUMERS),
        mask,
    )
    if IN_TURN:
        pass_turn(CONSUMERS - 1, CONSUMERS)  # so the first consumer's is the first
    visits = None
    if visited_ptr is not None:
        visits = (visited_ptr, visit_counts_ptr, visit_batch, visit_head)
    bounds = Bounds(
        q_len, kv_len, diagonal, left, right, q_offsets_ptr, k_starts_ptr, k_lengths_ptr, visits
    )
    work = Work(q_heads, tiles, blocks, bundles, section)
    scales = (key_scale_ptr, value_scale_ptr, group, groups)
    extras = Extras(factor, cap, key_mean_ptr, sinks_ptr)
    descriptors = (query_desc, key_desc, value_desc, mask_desc)
    load = (descriptors, rings, work, bounds, group, groups, (mask_batch, mask_head))
    outputs = (o_buffers, output, stride_output_head, stride_output_token)
    attend = (queries, rings, scales, outputs, work, bounds, extras)
    # The first consumer is the program's own four warps. Gluon wants every list written out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_attend, (attend, 3, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM)),
                (_load, (load, CONSUMERS, HEADS, BY_LENGTH)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _load(arguments, CONSUMERS: gl.constexpr, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr):
    """The loading warp: all blocks of all tiles, as soon as there is room."""
    descriptors, rings, work, bounds, group, groups, mask_steps = arguments
    query_desc, key_desc, value_desc, mask_desc = descriptors
    mask_batch, mask_head = mask_steps
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    count = 0  # key blocks so far, of all tiles
    masks = 0  # those with a block of the mask
    done = 0
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), BY_LENGTH)):
        head, block = tile_of(turn, work, HEADS, BY_LENGTH)
        batch, q_head = head // work.q_heads, head % work.q_heads
        span = span_of(batch, bounds)
        if bounds.q_offsets is None:
            done = turn
        if tile_exists(block * QUERIES, span, bounds):
            element = element_of(batch, bounds)
            for who in gl.static_range(CONSUMERS):
                row = span.q_start + block * QUERIES + who // HEADS * ROWS
                fill(rings.query, query_desc, [element, q_head + who % HEADS, row, 0], who, done)
            kept = _kept(head, span, work, bounds, group)
            if bounds.visits is None:
                begin, _, _, end = key_blocks_of(block * QUERIES, span, bounds, QUERIES, KEYS)
            else:
                visits = visits_of(batch, q_head, block, bounds, KEYS)
                begin = 0
                end = gl.maximum(visits[2] + visits[3], 1)
            for i in range(begin, end):
                key = i * KEYS
                if bounds.visits is not None:
                    key = visited_key(end - 1 - i, visits, bounds)
                stage, phase = buffer_of(count, STAGES)
                row = (kept.head * groups + kept.group) * SCALE_GROUP + key
                fill_shared(rings.key, key_desc, [row, 0], stage, phase, KEY, CONSUMERS)
                if mask_desc is not None:  # noqa: SIM102 (decided while this is compiled)
                    if i >= end - gl.maximum(visits[3], 1):
                        own = [batch * mask_batch, q_head, block * QUERIES, key]
                        fill_mask(rings.mask, mask_desc, own, mask_head, masks, CONSUMERS, HEADS)
                        masks += 1
                if value_desc.dtype == gl.float8e4nv:
                    DV: gl.constexpr = value_desc.block_type.shape[0]
                    place = [kept.head * DV, kept.group * SCALE_GROUP + key]
                    fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
                else:
                    place = [element, q_head // group, span.k_start + key, 0]
                    fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
                count += 1
            done += 1


@gluon.jit
def _kept(head, span, work, bounds, group):
    """Where the keys of a query head, counted over the batch, are kept."""
    at = head // group
    first = 0
    if bounds.q_offsets is not None:
        at = head % work.q_heads // group
        first = first_group(span.k_start, head // work.q_heads, SCALE_GROUP)
    return Kept(at, first)


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Consumer number WHO: 64 queries of every tile."""
    _, rings, _, _, work, bounds, _ = arguments
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    count = 0
    masks = 0
    done = 0
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), BY_LENGTH)):
        exists = True
        if bounds.q_offsets is not None:
            head, block = tile_of(turn, work, HEADS, BY_LENGTH)
            span = span_of(head // work.q_heads, bounds)
            exists = tile_exists(block * QUERIES, span, bounds)
        else:
            done = turn
        if exists:
            count, masks = _attend_tile(
                arguments, turn, count, masks, done,
                WHO, HEADS, BY_LENGTH, IN_TURN, IN_TENSOR_CORES, V_HEAD_DIM,
            )  # fmt: skip
            done += 1
    tma.store_wait(0)


@gluon.jit
def _attend_tile(
    arguments,
    turn,
    count,
    masks,
    done,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """A consumer's queries of one tile. Returns how many blocks of keys there have been, and how
    many with a block of the mask: `count` and `masks` are those of the tiles before."""
    queries, rings, scales, outputs, work, bounds, extras = arguments
    key_scale_ptr, value_scale_ptr, group, groups = scales
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    DV: gl.constexpr = outputs[0].shape[4]
    # What `start_scores` gives; an instruction of INT8 or FP8 takes 32 of the head_dim.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DV, 32 if FP8_VALUE else 16]
    )
    wait_for(rings.query, WHO, done)
    # What it takes to find the tile hides behind what the query takes.
    head, block = tile_of(turn, work, HEADS, BY_LENGTH)
    head += WHO % HEADS
    batch, q_head = head // work.q_heads, head % work.q_heads
    span = span_of(batch, bounds)
    first = block * QUERIES + WHO // HEADS * ROWS
    kept = _kept(head, span, work, bounds, group)
    of_groups = kept.head * groups + kept.group
    of_head = (key_scale_ptr + of_groups, value_scale_ptr + of_groups)
    if bounds.visits is None:
        begin, whole_first, whole_end, end = key_blocks_of(
            block * QUERIES, span, bounds, QUERIES, KEYS
        )
        current = begin
    else:
        visits = visits_of(batch, q_head, block, bounds, KEYS)
        end = gl.maximum(visits[2] + visits[3], 1)
        current = visited_key(end - 1, visits, bounds) // KEYS
    of_keys, of_values = _scales(of_head, current, bounds, KEYS, FP8_VALUE)
    query = queries.index(WHO)
    unquantised = rings.query.buffers.index(WHO)
    shift = None
    if extras.key_mean is not None:
        D: gl.constexpr = query.shape[1]
        mean = extras.key_mean + head // group * D
        shift = _times_mean(unquantised, mean, extras.factor, D, SCORES)
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
    if bounds.visits is None:
        # Blocks that a window's left side cuts, those that all queries see whole, those that the
        # diagonal or its right side cuts, and the last. Without a right side all before the last
        # are seen whole to their ends.
        if bounds.left is not None:
            for i in range(begin, whole_first):
                state = _step(
                    state, rows, rings, of_head, count, masks, i, i + 1, span,
                    bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
                )  # fmt: skip
                count += 1
        for i in range(whole_first, whole_end):
            state = _step(
                state, rows, rings, of_head, count, masks, i, i + 1, span,
                bounds, extras.cap, WHO, CONSUMERS, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            count += 1
        if bounds.right is not None:
            for i in range(whole_end, end - 1):
                state = _step(
                    state, rows, rings, of_head, count, masks, i, i + 1, span,
                    bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
                )  # fmt: skip
                count += 1
        current = end - 1
    else:
        # Those that the mask leaves whole, and those that it cuts. A block's place is looked up
        # two blocks ahead, its scales one.
        plain = end - gl.maximum(visits[3], 1)
        following = visited_key(gl.maximum(end - 2, 0), visits, bounds) // KEYS
        for i in range(plain):
            later = visited_key(gl.maximum(end - 3 - i, 0), visits, bounds) // KEYS
            state = _step(
                state, rows, rings, of_head, count, masks, current, following, span,
                bounds, extras.cap, WHO, CONSUMERS, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            current, following = following, later
            count += 1
        for i in range(plain, end - 1):
            later = visited_key(gl.maximum(end - 3 - i, 0), visits, bounds) // KEYS
            state = _step(
                state, rows, rings, of_head, count, masks, current, following, span,
                bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            current, following = following, later
            count += 1
            masks += 1
    state = _step(
        state, rows, rings, of_head, count, masks, current, current, span,
        bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, True,
    )  # fmt: skip
    count += 1
    masks += 1

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
    _store(output, outputs, [batch, q_head, first, 0], span, bounds, WHO, V_HEAD_DIM)
    return count, masks


@gluon.jit
def _store(output, outputs, place, span, bounds, WHO: gl.constexpr, V_HEAD_DIM: gl.constexpr):
    """A consumer's output."""
    o_buffers, to, stride_head, stride_token = outputs
    o_buffer = o_buffers.index(WHO)
    tma.store_wait(0)  # that of the tile before, which still reads this memory
    matrix(o_buffer).store(output.to(o_buffer.dtype))
    if bounds.q_offsets is None:
        fence_async_shared()
        tma_store(to, place, o_buffer)
    else:
        to += place[1].to(gl.int64) * stride_head
        store_rows(o_buffer, to, stride_token, place[2], span, V_HEAD_DIM)


@gluon.jit
def _step(
    state,
    rows,
    rings,
    scales,
    count,
    masks,
    block,
    next_block,
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
    number among those of the batch element's keys, `next_block` that of the next.
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
        next_of_keys, next_of_values = _scales(scales, next_block, bounds, KEYS, FP8_VALUE)
    weights, maximum, total, shrink = _weigh(
        scores, scale, rows, rings, exponent, of_values, maximum, total, masks, block, span, bounds,
        cap, OUTPUT, WHO, IS_MASKED,
    )  # fmt: skip
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]

    stage, phase = buffer_of(count, STAGES)
    next_stage, next_phase = buffer_of(count + 1, STAGES)
    HAS_LENGTHS: gl.constexpr = bounds.k_lengths is not None or bounds.q_offsets is not None
    if IS_LAST and HAS_LENGTHS and not FP8_VALUE:
        # Behind the last key lie somebody else's values, or none that count.
        left_over = span.kv_len - block * KEYS
        if left_over < KEYS:
            wait_for(rings.value, stage, phase)
            clear(matrix(rings.value.buffers.index(stage)), left_over)
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
    rings,
    exponent,
    of_values,
    maximum,
    total,
    masks,
    block,
    span,
    bounds,
    cap,
    OUTPUT: gl.constexpr,
    WHO: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Softmax of one block: its weights, as PV in the layout OUTPUT wants them, and the running
    maximum and sum with the factor for what was summed before."""
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    DTYPE: gl.constexpr = rings.value.buffers.dtype
    FP8_VALUE: gl.constexpr = DTYPE == gl.float8e4nv  # noqa: SIM300
    KEYS: gl.constexpr = scores.shape[1]
    scores = scores.to(gl.float32)
    if cap is not None:
        scores *= scale[:, None]
        if rows.shift is not None:
            scores += rows.shift[:, None]
        scores = _approximately(TANH, scores)
    if IS_MASKED:
        if rings.mask is not None:
            scores = hide(scores, rings.mask, masks, CONSUMERS, WHO)
        else:
            scores = hide_unseen(scores, rows.first, block * KEYS, span, bounds)
    largest = gl.max(scores, 1)
    # A group of INT8 keys with a NaN has it in its scale. That times -inf is NaN, but a row that
    # sees none of the group has nothing of its NaN.
    SPREADS_NAN: gl.constexpr = IS_MASKED and cap is None and rows.query.dtype == gl.int8
    not_finite = 0.0
    if SPREADS_NAN:
        not_finite = gl.where(largest > float("-inf"), scale * 0.0, 0.0)
        scale = gl.where(scale == scale, scale, 1.0)
    # No scale is negative, so that the largest product is the largest score.
    largest = largest * (scale if cap is None else cap)
    new_maximum = gl.maximum(maximum, largest + exponent)
    subtracted = new_maximum
    MAY_SEE_NOTHING: gl.constexpr = (
        bounds.left is not None
        or bounds.diagonal is None
        or bounds.k_lengths is not None
        or bounds.q_offsets is not None
        or rings.mask is not None
    )
    if IS_MASKED and MAY_SEE_NOTHING:
        # A row that has seen no key yet: -inf minus itself would be NaN.
        subtracted = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    origin = subtracted - exponent
    if FP8_VALUE:
        origin = origin - LOG2_FP8_MAX
    if SPREADS_NAN:
        origin = origin + not_finite
    if cap is None:
        weights = gl.exp2(scores * scale[:, None] - origin[:, None])
    else:
        weights = gl.exp2(scores * cap - origin[:, None])
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
    instructions for the last bit and for numbers below 1e-38; or its tanh."""
    PTX: gl.constexpr = INSTRUCTION + " $0, $1;"
    return gl.inline_asm_elementwise(PTX, "=f,f", [number], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _scales(scales, block, bounds, KEYS: gl.constexpr, FP8_VALUE: gl.constexpr):
    """A block's scales of keys and of values; values of 16 bits have none."""
    key_scale_ptr, value_scale_ptr = scales
    group = block * KEYS // SCALE_GROUP
    if bounds.visits is not None:
        # Where nothing is seen, what is visited may be behind the last.
        group = gl.minimum(group, (bounds.kv_len - 1) // SCALE_GROUP)
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
    """A consumer's queries into shared memory; their scales. Where a row is not finite, a number of
    it is NaN in FP8, and its scale in INT8."""
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
        scale = gl.where(not_finite == 0.0, largest / FP8_MAX, 1.0)
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
