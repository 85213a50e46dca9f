"""FlashAttention 3's schedule (Shah et al. 2024) for Hopper GPUs, in Gluon, Triton's lower level.

    Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: "FlashAttention-3: Fast and Accurate Attention
    with Asynchrony and Low-precision". docs/kernel-notes.md has a drawing.

- One warp loads blocks of query, key and value for the warp groups ("consumers"), which compute 64
  queries each (`pipeline.py`).
- A consumer starts QKᵀ of the next block of keys and PV of the current one together. The consumer
  computes the softmax of the next block while PV is still running (`_step`).
- Consumers take turns at starting their products, so that one consumer's softmax overlaps another
  consumer's products.
- The grid is persistent (`persistent.py`): the loads of a program's next tile begin while the
  current tile is being finished.
- Consumers may have different heads of one group, which share the keys, instead of different
  queries of one head. If a causal tile has fewer queries, fewer keys are seen by only some queries.

Blocks of keys that need a mask are visited before a loop without masks (`key_ranges.py`). A head
dimension that is not a power of two is split into two pieces, with one product each: 192 is 128 +
64, and 80 is 64 + 16.
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
    first_query_of,
    key_blocks_of,
    masked_of,
    memory_batch_of,
    visited_blocks_at,
    visited_key,
)
from attention_kernels.hopper.mask_blocks import fill_mask
from attention_kernels.hopper.output import Outputs, finish, sink_of
from attention_kernels.hopper.pages import PageTable, tile_in_pages
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
    clear,
    fill,
    fill_from_pages,
    fill_shared,
    make_ring,
    make_shared_ring,
    meet,
    pass_turn,
    release,
    release_shared,
    wait_for,
    wait_for_turn,
)
from attention_kernels.hopper.rescale import rescale
from attention_kernels.hopper.scores import ROWS, add_scores, matrix, own_sums, start_scores
from attention_kernels.hopper.softmax import SoftmaxExtras, unpack, weigh, weigh_whole
from attention_kernels.hopper.stream_k import ProgramShare, columns_of, gather
from attention_kernels.tiles.division import quotient
from attention_kernels.tiles.online_softmax import LOG2_E


class PrefillRings(NamedTuple):
    """Buffers for blocks on their way from the producer to the consumers."""

    query: Any
    """One buffer for each consumer, (1, 1, ROWS, D)."""
    key: Any
    """STAGES buffers of (1, 1, KEYS, D)."""
    value: Any
    query_rest: Any
    """Buffers for the second piece of the head dimension, as many as for the first piece; or
    None."""
    key_rest: Any
    value_rest: Any
    mask: Any
    """MASK_STAGES buffers for each consumer, (1, 1, ROWS, KEYS / 2) uint16, two bytes of a bool
    mask in each number; None without a bool mask."""
    bias: Any
    """MASK_STAGES buffers for each consumer, (1, 1, ROWS, KEYS), for a float mask; or None."""


# Without `do_not_specialize`, Triton recompiles a kernel for integers that are 1 or multiples of
# 16. A new sequence length would then cost a user seconds.
@gluon.jit(
    do_not_specialize=[
        "q_heads", "rows", "q_len", "kv_len", "diagonal", "left", "right", "most_cut", "tiles",
        "turns", "blocks", "bundles", "head_group", "group_numbers", "share_row", "share_each",
        "of_q_heads", "of_group", "of_head_groups", "of_head_group", "of_last", "mask_batch",
        "mask_head", "visit_batch", "visit_head", "stride_table", "sequences", "decoded",
    ]
)  # fmt: skip
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    q_rest_desc,
    k_rest_desc,
    v_rest_desc,
    o_rest_desc,
    mask_desc,
    output,
    lse,
    sinks,
    q_offsets,
    k_starts,
    k_lengths,
    table,
    visited,
    visit_counts,
    parts_ptr,
    arrivals_ptr,
    q_heads,
    rows,
    q_len,
    kv_len,
    diagonal,
    left,
    right,
    most_cut,
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
    mask_batch,
    mask_head,
    visit_batch,
    visit_head,
    stride_table,
    sequences,
    decoded,
    stride_output_batch,
    stride_output_head,
    stride_output_token,
    scale,
    cap,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    MASK_STAGES: gl.constexpr,
    ADDS_MASK: gl.constexpr,
    REGISTERS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    ALIGNED_TO: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Set up a persistent program's shared memory, and start its loading warp and its consumers.

    Unused arguments are None, and the compiled program does not have them: the second pieces of the
    head dimensions, the mask, `lse`, `sinks`, lengths, `visited` (of `VisitedBlocks`), the fields
    of a `ProgramShare`, `diagonal`, `most_cut` and ALIGNED_TO (as in `CallBounds`), `left`,
    `right`, `cap`, and `output` with its strides (as in `Outputs`). `mask_batch` and `mask_head`
    are 1, or 0 if all batch elements or heads share one mask. A packed call has one batch element
    in memory: `q_len` is the length of the longest sequence, and `rows` is the total number of
    queries. BY_LENGTH: tiles differ in length; the longest come first. With PAGE_SIZE, the keys of
    a packed call lie in pages (`pages.PageTable`), and a box of the descriptors of key and value is
    a part of a page.
    """
    dtype: gl.constexpr = q_desc.dtype
    query_shape: gl.constexpr = [CONSUMERS] + q_desc.block_type.shape  # noqa: RUF005 (Gluon has no such syntax)
    K_BLOCK: gl.constexpr = (
        [1, 1, KEYS, q_desc.block_type.shape[3]] if PAGE_SIZE else k_desc.block_type.shape
    )
    V_BLOCK: gl.constexpr = [1, 1, KEYS, V_HEAD_DIM] if PAGE_SIZE else v_desc.block_type.shape
    key_shape: gl.constexpr = [STAGES] + K_BLOCK  # noqa: RUF005
    value_shape: gl.constexpr = [STAGES] + V_BLOCK  # noqa: RUF005
    output_shape: gl.constexpr = [CONSUMERS] + o_desc.block_type.shape  # noqa: RUF005
    q_buffers = gl.allocate_shared_memory(dtype, query_shape, q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, key_shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, value_shape, v_desc.layout)
    o_buffers = gl.allocate_shared_memory(dtype, output_shape, o_desc.layout)
    q_rest = None
    k_rest = None
    if q_rest_desc is not None:
        query_rest_shape: gl.constexpr = [CONSUMERS] + q_rest_desc.block_type.shape  # noqa: RUF005
        key_rest_shape: gl.constexpr = [STAGES] + k_rest_desc.block_type.shape  # noqa: RUF005
        q_rest = gl.allocate_shared_memory(dtype, query_rest_shape, q_rest_desc.layout)
        k_rest = gl.allocate_shared_memory(dtype, key_rest_shape, k_rest_desc.layout)
    v_rest = None
    o_rest = None
    if v_rest_desc is not None:
        value_rest_shape: gl.constexpr = [STAGES] + v_rest_desc.block_type.shape  # noqa: RUF005
        output_rest_shape: gl.constexpr = [CONSUMERS] + o_rest_desc.block_type.shape  # noqa: RUF005
        v_rest = gl.allocate_shared_memory(dtype, value_rest_shape, v_rest_desc.layout)
        o_rest = gl.allocate_shared_memory(dtype, output_rest_shape, o_rest_desc.layout)
    mask = None
    bias = None
    if mask_desc is not None:
        mask_shape: gl.constexpr = [CONSUMERS * MASK_STAGES] + mask_desc.block_type.shape  # noqa: RUF005
        buffers = gl.allocate_shared_memory(mask_desc.dtype, mask_shape, mask_desc.layout)
        if ADDS_MASK:
            bias = make_ring(buffers)
        else:
            mask = make_ring(buffers)
    rings = PrefillRings(
        make_ring(q_buffers),
        make_shared_ring(k_buffers, CONSUMERS),
        make_shared_ring(v_buffers, CONSUMERS),
        q_rest,
        k_rest,
        v_rest,
        mask,
        bias,
    )
    pass_turn(CONSUMERS - 1, CONSUMERS)  # so that the first consumer has the first turn
    lists = None
    if visited is not None:
        lists = (visited, visit_counts, visit_batch, visit_head)
    pages = None
    if table is not None:
        pages = PageTable(table, stride_table, sequences, decoded, PAGE_SIZE)
    bounds = CallBounds(
        q_len, kv_len, diagonal, left, right, most_cut, q_offsets, k_starts, k_lengths, lists,
        ALIGNED_TO, pages,
    )  # fmt: skip
    share = None
    if parts_ptr is not None:
        share = ProgramShare(share_row, share_each, parts_ptr, arrivals_ptr)
    reciprocals = (of_q_heads, of_head_groups, of_head_group, of_last)
    work = Work(
        q_heads, tiles, turns, blocks, bundles, head_group, group_numbers, reciprocals, share
    )
    descriptors = (q_desc, k_desc, v_desc, q_rest_desc, k_rest_desc, v_rest_desc, mask_desc)
    load = (descriptors, rings, work, bounds, of_group, (mask_batch, mask_head))
    extras = SoftmaxExtras(scale, cap, sinks)
    outputs = Outputs(
        o_buffers, o_desc, output, stride_output_head, stride_output_token, lse, rows,
        stride_output_batch, o_rest, o_rest_desc,
    )  # fmt: skip
    attend = (rings, outputs, work, bounds, extras)
    # The first consumer is the program's own four warps. Gluon requires every list to be explicit.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_load, (load, HEADS, BY_LENGTH)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_load, (load, HEADS, BY_LENGTH)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 1, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 2, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_attend, (attend, 3, HEADS, BY_LENGTH, V_HEAD_DIM)),
                (_load, (load, HEADS, BY_LENGTH)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _load(arguments, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr):
    """Run the loading warp: load all blocks of all tiles, each as soon as a buffer is free."""
    descriptors, rings, work, bounds, of_group, mask_steps = arguments
    q_desc, k_desc, v_desc, q_rest_desc, k_rest_desc, v_rest_desc, mask_desc = descriptors
    mask_batch, mask_head = mask_steps
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[3]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    count = 0  # number of key blocks so far, in all tiles
    masks = 0  # number of key blocks with a block of the mask
    done = 0
    q_rest = None
    k_rest = None
    if q_rest_desc is not None:
        q_rest = (q_rest_desc, rings.query_rest)
        k_rest = (k_rest_desc, rings.key_rest)
    v_rest = None
    if v_rest_desc is not None:
        v_rest = (v_rest_desc, rings.value_rest)
    mask_ring = rings.mask
    if rings.bias is not None:
        mask_ring = rings.bias
    for turn in range(turns_of_program(work, BY_LENGTH)):
        batch, q_head, block = _tile_of(turn, work, bounds, QUERIES, HEADS, BY_LENGTH)
        kv_head = quotient(q_head, of_group)
        element = element_bounds_of(batch, bounds)
        first = first_query_of(block, element, bounds, QUERIES)
        if has_tile(turn, first, element, work, bounds, QUERIES, KEYS, BY_LENGTH):
            memory_batch = memory_batch_of(batch, bounds)
            if bounds.visited is None:
                blocks = blocks_of_tile(turn, first, element, work, bounds, QUERIES, KEYS)
                steps = blocks[3] - blocks[0]
            else:
                visited = visited_blocks_at(batch, q_head, block, bounds, KEYS)
                steps = gl.maximum(visited[2] + visited[3], 1)
            for i in range(steps):
                has_mask = True
                if bounds.visited is None:
                    key = element.k_start + block_at(i, blocks, bounds) * KEYS
                else:
                    key = visited_key(i, visited, bounds, KEYS)
                    has_mask = i < gl.maximum(visited[3], 1)
                stage, phase = count % STAGES, count // STAGES
                at = [memory_batch, kv_head, key, 0]
                if bounds.pages is None:
                    fill_shared(rings.key, k_desc, at, stage, phase, KEY, CONSUMERS, k_rest)
                else:
                    _fill_from_pages(
                        rings.key, k_desc, batch, kv_head, key, element, bounds, stage, phase,
                        KEY, CONSUMERS,
                    )  # fmt: skip
                if i == 0:  # not earlier: consumers release queries last
                    for who in gl.static_range(CONSUMERS):
                        row = element.q_start + first + who // HEADS * ROWS
                        own = [memory_batch, q_head + who % HEADS, row, 0]
                        fill(rings.query, q_desc, own, who, done, q_rest)
                if mask_desc is not None:  # noqa: SIM102 (decided while this is compiled)
                    if has_mask:
                        own = [batch * mask_batch, q_head, first, key]
                        fill_mask(mask_ring, mask_desc, own, mask_head, masks, CONSUMERS, HEADS)
                        masks += 1
                if bounds.pages is None:
                    fill_shared(rings.value, v_desc, at, stage, phase, VALUE, CONSUMERS, v_rest)
                else:
                    _fill_from_pages(
                        rings.value, v_desc, batch, kv_head, key, element, bounds, stage, phase,
                        VALUE, CONSUMERS,
                    )  # fmt: skip
                count += 1
            done += 1


@gluon.jit
def _tile_of(
    turn, work, bounds, QUERIES: gl.constexpr, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr
):
    """Return the batch element, first query head and block of queries of a turn."""
    if bounds.pages is None:
        tile = tile_of(turn, work, HEADS, BY_LENGTH)
    else:
        tile = tile_in_pages(turn, work, bounds, QUERIES, HEADS)
    return tile


@gluon.jit
def _fill_from_pages(
    ring, desc, batch, kv_head, key, element, bounds, index, phase, WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Call `fill_from_pages` for a sequence."""
    pages = bounds.pages
    own = pages.table + batch.to(gl.int64) * pages.stride
    last = gl.maximum(element.kv_len - 1, 0)
    fill_from_pages(
        ring, desc, own, kv_head, key, last, index, phase, WHICH, CONSUMERS, pages.PAGE_SIZE
    )


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Run consumer number WHO: compute 64 queries of every tile."""
    rings, outputs, work, bounds, extras = arguments
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    KEYS: gl.constexpr = rings.key.buffers.shape[3]
    count = 0
    masks = 0
    done = 0
    for turn in range(turns_of_program(work, BY_LENGTH)):
        batch, q_head, block = _tile_of(turn, work, bounds, QUERIES, HEADS, BY_LENGTH)
        q_head += WHO % HEADS
        element = element_bounds_of(batch, bounds)
        first = first_query_of(block, element, bounds, QUERIES)
        if has_tile(turn, first, element, work, bounds, QUERIES, KEYS, BY_LENGTH):
            place = (memory_batch_of(batch, bounds), q_head)
            visited = ()
            if bounds.visited is not None:
                visited = visited_blocks_at(batch, q_head, block, bounds, KEYS)
            count, masks = _attend_tile(
                turn, work, rings, outputs, place, element, bounds, visited, extras,
                first, count, masks, done, WHO, HEADS, V_HEAD_DIM,
            )  # fmt: skip
            done += 1
    tma.store_wait(0)


@gluon.jit
def _attend_tile(
    turn,
    work,
    rings,
    outputs,
    place,
    element,
    bounds,
    visited,
    extras,
    first_of_tile,
    count,
    masks,
    done,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Compute a consumer's queries in the tile of a turn.

    Return the number of key blocks so far, and the number of those with a block of the mask.
    `count` and `masks` are the same numbers before this tile.
    """
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[3]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    first = first_of_tile + WHO // HEADS * ROWS
    # If a diagonal cuts several blocks of a tile, only the tile's last queries see the last blocks.
    MAY_SKIP: gl.constexpr = (
        QUERIES > KEYS
        and bounds.most_cut is not None
        and bounds.left is None
        and bounds.visited is None
        and rings.mask is None
        and rings.bias is None
        and work.share is None
    )
    skipped = 0
    if bounds.visited is None:
        blocks = blocks_of_tile(turn, first_of_tile, element, work, bounds, QUERIES, KEYS)
        masked, steps = masked_of(blocks, bounds), blocks[3] - blocks[0]
        if MAY_SKIP:
            _, _, _, end = key_blocks_of(first, element, bounds, ROWS, KEYS)
            skipped = blocks[3] - end
            for _ in range(skipped):
                _skip(rings, count, WHO)
                count += 1
        key = block_at(skipped, blocks, bounds) * KEYS
    else:
        masked = 1
        if rings.mask is not None or rings.bias is not None or bounds.most_cut is not None:
            masked = gl.maximum(visited[3], 1)
        steps = visited[2] + visited[3]
        key = visited_key(0, visited, bounds, KEYS)
    wait_for(rings.query, WHO, done)

    # The first visited block has no PV before it.
    stage = count % STAGES
    wait_for(rings.key, stage, count // STAGES)
    wait_for_turn(WHO)
    scores = _start(rings, stage, WHO)
    pass_turn(WHO, CONSUMERS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    has_one_block = False
    # Wider outputs leave no register for this.
    if rings.value.buffers.shape[4] <= 128 and rings.value_rest is None:
        has_one_block = steps == skipped + 1
    if has_one_block:  # the next queries are loaded while this tile is finished
        release(rings.query, WHO)
    _release_keys(rings, stage, CONSUMERS)
    OWN: gl.constexpr = own_sums(scores).type.layout
    nothing = gl.full([ROWS, 4], float("-inf"), gl.float32, OWN)
    packed, sums, reference, _ = weigh(
        scores, nothing, rings, masks, first, key, element, bounds, extras, WHO, True
    )
    if bounds.k_lengths is not None or bounds.q_offsets is not None:
        # Values after the last key belong to another sequence or are invalid.
        left_over = element.kv_len - key
        if left_over < KEYS:
            wait_for(rings.value, stage, count // STAGES)
            clear(matrix(rings.value.buffers.index(stage)), left_over)
            if rings.value_rest is not None:
                clear(matrix(rings.value_rest.index(stage)), left_over)
    output = _zeros_for(rings.value.buffers)
    if rings.value_rest is not None:
        output += _zeros_for(rings.value_rest)
    state = (packed, output, reference, sums)
    count += 1
    masks += 1
    for i in range(skipped + 1, masked):
        if bounds.visited is None:
            key = block_at(i, blocks, bounds) * KEYS
        else:
            key = visited_key(i, visited, bounds, KEYS)
        state = _step(state, rings, count, masks, first, key, element, bounds, extras, WHO, True)
        count += 1
        masks += 1
    for _ in range(masked, steps):
        state = _step(state, rings, count, masks, first, 0, element, bounds, extras, WHO, False)
        count += 1
        if bounds.visited is None:
            masks += 1
    if not has_one_block:
        release(rings.query, WHO)

    # Compute PV of the last visited block, then divide and store the output.
    packed, output, reference, sums = state
    total = gl.sum(sums, 1)
    stage = (count - 1) % STAGES
    wait_for(rings.value, stage, (count - 1) // STAGES)
    output = _add_values(output, packed, rings, stage)
    output = warpgroup_mma_wait(0, deps=output + (packed,))[:-1]  # noqa: RUF005
    release_shared(rings.value, stage, VALUE, CONSUMERS)
    reference = gl.max(reference, 1)
    if rings.bias is not None:
        reference *= LOG2_E
    is_whole = True
    if work.share is not None:
        begin, _, _, end = key_blocks_of(first_of_tile, element, bounds, QUERIES, KEYS)
        output, reference, total, is_whole = gather(
            output, reference, total, turn - work.turns, work.share, end - begin, WHO, CONSUMERS
        )
    if is_whole:
        batch, q_head = place
        sink = sink_of(extras.sinks, q_head)
        at = (batch, work.q_heads, q_head, first)
        finish(output, reference, total, sink, outputs, at, element, WHO, V_HEAD_DIM)
    return count, masks


@gluon.jit
def _step(
    state,
    rings,
    count,
    masks,
    first_query,
    first_key,
    element,
    bounds,
    extras,
    WHO: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """Compute scores and softmax of block number `count`, and PV of the block before it."""
    packed, output, reference, total = state
    dtype: gl.constexpr = rings.value.buffers.dtype
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    # With wider values, the output alone takes half the registers.
    FITS: gl.constexpr = columns_of(output) <= 128
    stage = count % STAGES
    before = (count - 1) % STAGES
    wait_for(rings.key, stage, count // STAGES)
    wait_for_turn(WHO)
    scores = _start(rings, stage, WHO)
    wait_for(rings.value, before, (count - 1) // STAGES)
    output = _add_values(output, packed, rings, before)
    pass_turn(WHO, CONSUMERS)
    # The operands of PV keep their registers until PV is done. A consumer with few registers waits
    # for PV.
    WAITS: gl.constexpr = CONSUMERS > 2
    if WAITS:
        done = warpgroup_mma_wait(0, deps=output + (scores, packed))  # noqa: RUF005
        output, scores, packed = done[:-2], done[-2], done[-1]
        release_shared(rings.value, before, VALUE, CONSUMERS)
    else:
        scores = warpgroup_mma_wait(len(output), deps=[scores])
    _release_keys(rings, stage, CONSUMERS)
    IS_WHOLE: gl.constexpr = (
        FITS
        and not IS_MASKED
        and rings.bias is None
        and (rings.mask is None or bounds.visited is not None)
    )
    if IS_WHOLE:
        weights, sums, reference, factor = weigh_whole(scores, reference, extras, dtype)
    else:
        weights, sums, reference, factor = weigh(
            scores, reference, rings, masks, first_query, first_key, element, bounds, extras, WHO,
            IS_MASKED,
        )  # fmt: skip
    total = total * factor + sums
    if not WAITS:
        done = warpgroup_mma_wait(0, deps=output + (weights, packed))  # noqa: RUF005
        output, weights, packed = done[:-2], done[-2], done[-1]
        release_shared(rings.value, before, VALUE, CONSUMERS)
    rescaled = output[:0]
    for i in gl.static_range(len(output)):
        rescaled += (rescale(output[i], factor),)
    return weights, rescaled, reference, total


@gluon.jit
def _skip(rings, count, WHO: gl.constexpr):
    """Release a block that a consumer's queries do not see, after the block is loaded. Earlier,
    other consumers may not have released the previous block in the same buffer."""
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    stage, phase = count % STAGES, count // STAGES
    wait_for_turn(WHO)
    pass_turn(WHO, CONSUMERS)
    wait_for(rings.key, stage, phase)
    release_shared(rings.key, stage, KEY, CONSUMERS)
    wait_for(rings.value, stage, phase)
    release_shared(rings.value, stage, VALUE, CONSUMERS)


@gluon.jit
def _release_keys(rings, stage, CONSUMERS: gl.constexpr):
    """Release keys after their scores are computed."""
    release_shared(rings.key, stage, KEY, CONSUMERS)
    if rings.mask is None and rings.bias is None:  # with a mask, its release makes the warps meet
        meet()


@gluon.jit
def _start(rings, stage, WHO: gl.constexpr):
    """Start QKᵀ of the keys in a buffer, one product for each piece of the head dimension."""
    query, key = rings.query, rings.key
    scores = start_scores(matrix(query.buffers.index(WHO)), matrix(key.buffers.index(stage)))
    if rings.query_rest is not None:
        query_rest, key_rest = rings.query_rest.index(WHO), rings.key_rest.index(stage)
        scores = add_scores(scores, matrix(query_rest), matrix(key_rest))
    return scores


@gluon.jit
def _zeros_for(values):
    """Return a tuple of zeros (ROWS, columns): the piece of an output whose values are in buffers
    (STAGES, 1, 1, KEYS, columns)."""
    COLUMNS: gl.constexpr = values.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return (gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT),)


@gluon.jit
def _add_values(output, packed, rings, stage):
    """Start PV of the values in a buffer, one product for each piece of the head dimension, added
    to `output`."""
    sums = _add_product(output[0], packed, rings.value.buffers, stage)
    if rings.value_rest is not None:
        sums += _add_product(output[1], packed, rings.value_rest, stage)
    return sums


@gluon.jit
def _add_product(piece, packed, buffers, stage):
    weights = unpack(packed, piece, buffers.dtype)
    return (warpgroup_mma(weights, matrix(buffers.index(stage)), piece, is_async=True),)
