"""Hopper (sm_90) kernel of `quantised_prefill.py`, in Gluon, with the operands and arithmetic of
the portable kernel.

Roles are as in FlashAttention 3 and `hopper_prefill_kernel.py`: one warp of a program loads blocks
of keys and values, and two to four warp groups of 64 queries each consume the blocks
(`pipeline.py`). A consumer quantises its own queries (`quantised_hopper_operands.py`). The consumer
starts PV of one block and QKᵀ of the next together, and completes the previous block while these
products run (`_step`). While a consumer computes exponentials (`quantised_hopper_softmax.py`), the
tensor cores serve the other consumers. A program stays on its multiprocessor and computes a list of
tiles (`persistent.py`), so that the next tile's first keys are already loaded when a tile is done.

Keys are visited from the first to the last. Among the blocks that need a mask, blocks that a
window's left side cuts come first (`key_ranges.py`). If there is a mask, its visited blocks come
from lists, and blocks that the mask cuts are last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from attention_kernels.hopper.key_ranges import (
    CallBounds,
    block_at,
    element_bounds_of,
    key_blocks_of,
    masked_of,
    memory_batch_of,
    visited_blocks_at,
    visited_key,
)
from attention_kernels.hopper.mask_blocks import fill_mask
from attention_kernels.hopper.output import Outputs, finish, sink_of
from attention_kernels.hopper.persistent import (
    Work,
    blocks_of_tile,
    has_tile,
    tile_of,
    turns_of_program,
)
from attention_kernels.hopper.pipeline import (
    KEY,
    LOADER_REGISTERS,
    VALUE,
    buffer_of,
    clear,
    fill,
    fill_shared,
    make_ring,
    make_shared_ring,
    meet,
    meet_after,
    pass_turn,
    release,
    release_shared,
    wait_for,
    wait_for_turn_after,
)
from attention_kernels.hopper.scores import ROWS, matrix, own_sums, start_scores
from attention_kernels.hopper.special_functions import LOG2, approximately
from attention_kernels.hopper.stream_k import ProgramShare, gather
from attention_kernels.quantised.quantised_hopper_operands import (
    SCALE_GROUP,
    QueryRows,
    quantise_query,
    scales_of,
    stored_keys_of,
    times_mean,
)
from attention_kernels.quantised.quantised_hopper_softmax import weigh
from attention_kernels.tiles.division import quotient
from attention_kernels.tiles.round_to_eight_bits import LOG2_FP8_MAX

MASK_STAGES = gl.constexpr(2)
"""Number of mask blocks that fit for each consumer."""


class QuantisedRings(NamedTuple):
    """Buffers for blocks on their way from the producer to the consumers."""

    query: Any
    """One buffer for each consumer, (1, 1, ROWS, D) in 16 bits."""
    key: Any
    """STAGES buffers of (KEYS, D)."""
    value: Any
    """STAGES buffers of (1, 1, KEYS, Dv), or in FP8 of (Dv, KEYS), transposed."""
    mask: Any
    """MASK_STAGES buffers for each consumer, (1, 1, ROWS, KEYS / 2) uint16, two bytes of a bool
    mask in each number; None without a mask."""


class QuantisedExtras(NamedTuple):
    """Operands of scores other than query and key; None for operands that a call does not have."""

    factor: Any
    """Softmax's scale · log2 e; with a cap, the factor from a product to tanh's argument."""
    cap: Any
    """Cap times log2 e."""
    key_mean: Any
    """(B, Hkv, D), the mean that was subtracted from the keys, if a cap or a sink needs it."""
    sinks: Any
    """(Hq,)."""


@gluon.jit(
    do_not_specialize=[
        "tiles", "turns", "blocks", "bundles", "head_group", "group_numbers", "share_row",
        "share_each", "of_q_heads", "of_group", "of_head_groups", "of_head_group", "of_last",
        "q_heads", "q_len", "kv_len", "diagonal", "left", "right", "most_cut", "groups",
        "mask_batch", "mask_head", "visit_batch", "visit_head",
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
    parts_ptr,
    arrivals_ptr,
    tiles,
    turns,
    blocks,
    bundles,
    head_group,
    group_numbers,
    share_row,
    share_each,
    of_q_heads,
    of_group,
    of_head_groups,
    of_head_group,
    of_last,
    q_heads,
    q_len,
    kv_len,
    diagonal,
    left,
    right,
    most_cut,
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
    """Set up a persistent program's shared memory, and start its loading warp and its consumers.

    `groups` is the number of scales of a key head. Unused arguments are None, and the compiled
    program does not have them: `diagonal` and `most_cut` (as in `CallBounds`), `left`, `right`,
    `cap`, sinks, the mean of the keys, lengths, the fields of a `ProgramShare`, and the mask with
    its `VisitedBlocks`. `mask_batch` and `mask_head` are 1, or 0 if all batch elements or heads
    share one mask. `output` is a descriptor, or a pointer in a packed call, where a tile may end
    within another sequence's rows. BY_LENGTH: tiles differ in length; the longest come first.
    Without IN_TURN, each consumer starts its products when it can. IN_TENSOR_CORES: as in the
    portable kernel.
    """
    D: gl.constexpr = key_desc.block_type.shape[1]
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], key_desc.dtype)
    queries = gl.allocate_shared_memory(key_desc.dtype, [CONSUMERS, ROWS, D], QUERY)
    k_shape: gl.constexpr = [STAGES] + key_desc.block_type.shape  # noqa: RUF005 (Gluon has no such syntax)
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
    rings = QuantisedRings(
        make_ring(q_buffers),
        make_shared_ring(k_buffers, CONSUMERS),
        make_shared_ring(v_buffers, CONSUMERS),
        mask,
    )
    if IN_TURN:
        pass_turn(CONSUMERS - 1, CONSUMERS)  # so that the first consumer has the first turn
    visited = None
    if visited_ptr is not None:
        visited = (visited_ptr, visit_counts_ptr, visit_batch, visit_head)
    bounds = CallBounds(
        q_len, kv_len, diagonal, left, right, most_cut,
        q_offsets_ptr, k_starts_ptr, k_lengths_ptr, visited,
    )  # fmt: skip
    share = None
    if parts_ptr is not None:
        share = ProgramShare(share_row, share_each, parts_ptr, arrivals_ptr)
    reciprocals = (of_q_heads, of_head_groups, of_head_group, of_last)
    work = Work(
        q_heads, tiles, turns, blocks, bundles, head_group, group_numbers, reciprocals, share
    )
    scales = (key_scale_ptr, value_scale_ptr, of_group, groups)
    extras = QuantisedExtras(factor, cap, key_mean_ptr, sinks_ptr)
    descriptors = (query_desc, key_desc, value_desc, mask_desc)
    load = (descriptors, rings, work, bounds, of_group, groups, (mask_batch, mask_head))
    output_desc = None
    pointer = None
    if q_offsets_ptr is None:
        output_desc = output
    else:
        pointer = output
    outputs = Outputs(o_buffers, output_desc, pointer, stride_output_head, stride_output_token)
    attend = (queries, rings, scales, outputs, work, bounds, extras)
    # The first consumer is the program's own four warps. Gluon requires every list to be explicit.
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
    """Run the loading warp: load all blocks of all tiles, each as soon as a buffer is free."""
    descriptors, rings, work, bounds, of_group, groups, mask_steps = arguments
    query_desc, key_desc, value_desc, mask_desc = descriptors
    mask_batch, mask_head = mask_steps
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    count = 0  # number of key blocks so far, in all tiles
    masks = 0  # number of key blocks with a block of the mask
    done = 0
    for turn in range(turns_of_program(work, BY_LENGTH)):
        batch, q_head, block = tile_of(turn, work, HEADS, BY_LENGTH)
        element = element_bounds_of(batch, bounds)
        if bounds.q_offsets is None and work.share is None and not BY_LENGTH:
            done = turn
        if has_tile(turn, block * QUERIES, element, work, bounds, QUERIES, KEYS, BY_LENGTH):
            memory_batch = memory_batch_of(batch, bounds)
            for who in gl.static_range(CONSUMERS):
                row = element.q_start + block * QUERIES + who // HEADS * ROWS
                fill(
                    rings.query, query_desc, [memory_batch, q_head + who % HEADS, row, 0], who, done
                )
            stored = stored_keys_of(batch, q_head, element, work, bounds, of_group)
            if bounds.visited is None:
                blocks = blocks_of_tile(turn, block * QUERIES, element, work, bounds, QUERIES, KEYS)
                steps = blocks[3] - blocks[0]
            else:
                visited = visited_blocks_at(batch, q_head, block, bounds, KEYS)
                steps = gl.maximum(visited[2] + visited[3], 1)
            for i in range(steps):
                if bounds.visited is None:
                    key = block_at(steps - 1 - i, blocks, bounds) * KEYS
                else:
                    key = visited_key(steps - 1 - i, visited, bounds, KEYS)
                stage, phase = buffer_of(count, STAGES)
                row = (stored.head * groups + stored.group) * SCALE_GROUP + key
                fill_shared(rings.key, key_desc, [row, 0], stage, phase, KEY, CONSUMERS)
                if mask_desc is not None:  # noqa: SIM102 (decided while this is compiled)
                    if i >= steps - gl.maximum(visited[3], 1):
                        own = [batch * mask_batch, q_head, block * QUERIES, key]
                        fill_mask(rings.mask, mask_desc, own, mask_head, masks, CONSUMERS, HEADS)
                        masks += 1
                if value_desc.dtype == gl.float8e4nv:
                    DV: gl.constexpr = value_desc.block_type.shape[0]
                    place = [stored.head * DV, stored.group * SCALE_GROUP + key]
                    fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
                else:
                    place = [memory_batch, quotient(q_head, of_group), element.k_start + key, 0]
                    fill_shared(rings.value, value_desc, place, stage, phase, VALUE, CONSUMERS)
                count += 1
            done += 1


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
    """Run consumer number WHO: compute 64 queries of every tile."""
    _, rings, _, _, work, bounds, _ = arguments
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    count = 0
    masks = 0
    done = 0
    for turn in range(turns_of_program(work, BY_LENGTH)):
        exists = True
        if bounds.q_offsets is not None or work.share is not None or BY_LENGTH:
            batch, _head, block = tile_of(turn, work, HEADS, BY_LENGTH)
            element = element_bounds_of(batch, bounds)
            exists = has_tile(
                turn, block * QUERIES, element, work, bounds, QUERIES, KEYS, BY_LENGTH
            )
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
    """Compute a consumer's queries of one tile.

    Return the number of key blocks so far, and the number of those with a block of the mask.
    `count` and `masks` are the same numbers before this tile.
    """
    queries, rings, scales, outputs, work, bounds, extras = arguments
    key_scale_ptr, value_scale_ptr, of_group, groups = scales
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    DV: gl.constexpr = outputs.buffers.shape[4]
    # The layout of the result of `start_scores`; an INT8 or FP8 instruction multiplies 32 columns
    # of the head dimension.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, DV, 32 if FP8_VALUE else 16]
    )
    wait_for(rings.query, WHO, done)
    # The tile's position is computed while the query is loaded.
    batch, q_head, block = tile_of(turn, work, HEADS, BY_LENGTH)
    q_head += WHO % HEADS
    element = element_bounds_of(batch, bounds)
    first = block * QUERIES + WHO // HEADS * ROWS
    stored = stored_keys_of(batch, q_head, element, work, bounds, of_group)
    of_groups = stored.head * groups + stored.group
    of_head = (key_scale_ptr + of_groups, value_scale_ptr + of_groups)
    if bounds.visited is None:
        blocks = blocks_of_tile(turn, block * QUERIES, element, work, bounds, QUERIES, KEYS)
        masked, steps = masked_of(blocks, bounds), blocks[3] - blocks[0]
        current = block_at(steps - 1, blocks, bounds)
    else:
        visited = visited_blocks_at(batch, q_head, block, bounds, KEYS)
        masked = gl.maximum(visited[3], 1)
        steps = gl.maximum(visited[2] + visited[3], 1)
        current = visited_key(steps - 1, visited, bounds, KEYS) // KEYS
    of_keys, of_values = scales_of(of_head, current, bounds, KEYS, FP8_VALUE)
    query = queries.index(WHO)
    unquantised = rings.query.buffers.index(WHO)
    shift = None
    if extras.key_mean is not None:
        D: gl.constexpr = query.shape[1]
        mean = extras.key_mean + quotient(batch * work.q_heads + q_head, of_group) * D
        shift = times_mean(unquantised, mean, extras.factor, D, SCORES)
    of_queries = quantise_query(unquantised, extras.factor, query, SCORES)
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
    rows = QueryRows(query, of_queries, shift, first)
    # Visit blocks without a mask, then blocks with a mask; the last block is handled separately.
    if bounds.visited is None:
        whole_first, whole_end = blocks[1], blocks[2]
        for i in range(whole_first, whole_end):
            following = i + 1
            if bounds.left is not None and following == whole_end:
                following = block_at(masked - 1, blocks, bounds)
            state = _step(
                state, rows, rings, of_head, count, masks, i, following, element,
                bounds, extras.cap, WHO, CONSUMERS, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            count += 1
        for i in range(1, masked):
            current = block_at(masked - i, blocks, bounds)
            following = block_at(masked - i - 1, blocks, bounds)
            state = _step(
                state, rows, rings, of_head, count, masks, current, following, element,
                bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            count += 1
        current = block_at(0, blocks, bounds)
    else:
        # A block's position is looked up two blocks ahead, and its scales one block ahead.
        following = visited_key(gl.maximum(steps - 2, 0), visited, bounds, KEYS) // KEYS
        for i in range(steps - masked):
            later = visited_key(gl.maximum(steps - 3 - i, 0), visited, bounds, KEYS) // KEYS
            state = _step(
                state, rows, rings, of_head, count, masks, current, following, element,
                bounds, extras.cap, WHO, CONSUMERS, False, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            current, following = following, later
            count += 1
        for i in range(steps - masked, steps - 1):
            later = visited_key(gl.maximum(steps - 3 - i, 0), visited, bounds, KEYS) // KEYS
            state = _step(
                state, rows, rings, of_head, count, masks, current, following, element,
                bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, False,
            )  # fmt: skip
            current, following = following, later
            count += 1
            masks += 1
    state = _step(
        state, rows, rings, of_head, count, masks, current, current, element,
        bounds, extras.cap, WHO, CONSUMERS, True, IN_TURN, IN_TENSOR_CORES, True,
    )  # fmt: skip
    count += 1
    masks += 1

    _, output, maximum, sums, _, _ = state
    total = gl.sum(sums, 1)
    maximum = gl.convert_layout(maximum, total.type.layout)
    is_whole = True
    if work.share is not None:
        begin, _, _, end = key_blocks_of(block * QUERIES, element, bounds, QUERIES, KEYS)
        pieces, maximum, total, is_whole = gather(
            (output,), maximum, total, turn - work.turns, work.share, end - begin, WHO, CONSUMERS
        )
        output = pieces[0]
    if extras.cap is not None:  # scores already include the shift
        shift = None
    LOG2_UNIT: gl.constexpr = LOG2_FP8_MAX if FP8_VALUE else 0.0
    if is_whole:
        sink = sink_of(extras.sinks, q_head)
        if sink is not None and shift is not None:  # the mean's term is missing in scores
            sink = sink - gl.convert_layout(shift, total.type.layout)
        at = (batch, work.q_heads, q_head, first)
        finish((output,), maximum, total, sink, outputs, at, element, WHO, V_HEAD_DIM, LOG2_UNIT)
    return count, masks


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
    element,
    bounds,
    cap,
    WHO: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_MASKED: gl.constexpr,
    IN_TURN: gl.constexpr,
    IN_TENSOR_CORES: gl.constexpr,
    IS_LAST: gl.constexpr,
):
    """Compute the softmax of block number `count`, whose scores are ready, and PV together with QKᵀ
    of the next block.

    Return the scores and the scales of the next block, unless this is a tile's last block. `block`
    and `next_block` are the numbers of the two blocks within the batch element.
    """
    scores, output, maximum, total, of_keys, of_values = state
    meet()
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[1]
    FP8_VALUE: gl.constexpr = rings.value.buffers.dtype == gl.float8e4nv
    OUTPUT: gl.constexpr = output.type.layout
    scale = rows.scale * of_keys
    exponent = approximately(LOG2, of_values) if FP8_VALUE else 0.0
    next_of_keys, next_of_values = of_keys, of_values
    if not IS_LAST:
        next_of_keys, next_of_values = scales_of(scales, next_block, bounds, KEYS, FP8_VALUE)
    weights, maximum, total, shrink = weigh(
        scores, scale, rows, rings, exponent, of_values, maximum, total, masks, block, element,
        bounds, cap, OUTPUT, WHO, IS_MASKED,
    )  # fmt: skip
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]

    stage, phase = buffer_of(count, STAGES)
    next_stage, next_phase = buffer_of(count + 1, STAGES)
    HAS_LENGTHS: gl.constexpr = bounds.k_lengths is not None or bounds.q_offsets is not None
    if IS_LAST and HAS_LENGTHS and not FP8_VALUE:
        # Values after the last key belong to another sequence or are invalid.
        left_over = element.kv_len - block * KEYS
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
