"""FlashAttention 3's schedule (Shah et al. 2024) for Hopper GPUs, in Gluon, Triton's lower level.

    Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: "FlashAttention-3: Fast and Accurate Attention
    with Asynchrony and Low-precision". docs/hopper-schedule.md has a drawing.

- One warp loads blocks of query, key and value, and warp groups ("consumers") of 64 queries each
  wait for them (`hopper_pipeline.py`).
- A consumer starts QKᵀ of the next block of keys and PV of this one together, and computes the next
  one's softmax while PV is still running (`_step`).
- Consumers take turns at starting their products, so that one's softmax runs beside another's.
- The grid is persistent (`persistent.py`): the loads of a program's next tile begin while this one
  is finished.
- Consumers may have different heads of one group, which share the keys, instead of different
  queries of one head: a causal tile of fewer queries has fewer keys that some of them must not see.

Blocks of keys are visited from the last to the first, so that those which need a mask, the last
ones, come before a loop without any.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from replay.kernels.triton.hopper_pipeline import (
    KEY,
    LOADER_REGISTERS,
    VALUE,
    fill,
    fill_shared,
    make_ring,
    make_shared_ring,
    pass_turn,
    release,
    release_shared,
    tma_store,
    wait_for,
    wait_for_turn,
)
from replay.kernels.triton.hopper_scores import ROWS, may_see, own_sums, start_scores
from replay.kernels.triton.persistent import Work, key_blocks, tile_of, turns_of

LN_2 = gl.constexpr(math.log(2))


class Rings(NamedTuple):
    """Blocks on their way from the producer to the consumers."""

    query: Any
    """One buffer for each consumer, (1, 1, ROWS, D)."""
    key: Any
    """STAGES of (1, 1, KEYS, D)."""
    value: Any


# Triton compiles a kernel anew for integers that are 1 or multiples of 16 unless told not to: every
# new sequence length would cost a user seconds.
@gluon.jit(
    do_not_specialize=[
        "q_heads", "group", "q_len", "kv_len", "tiles", "blocks", "bundles", "section"
    ]
)  # fmt: skip
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    q_heads,
    group,
    q_len,
    kv_len,
    tiles,
    blocks,
    bundles,
    section,
    scale,
    CONSUMERS: gl.constexpr,
    HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A persistent program: its shared memory, and who does what. `scale` is in base 2."""
    dtype: gl.constexpr = q_desc.dtype
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    query_shape: gl.constexpr = [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    key_shape: gl.constexpr = [STAGES, 1, 1, KEYS, HEAD_DIM]
    q_buffers = gl.allocate_shared_memory(dtype, query_shape, q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, key_shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, key_shape, v_desc.layout)
    o_buffers = gl.allocate_shared_memory(dtype, query_shape, o_desc.layout)
    rings = Rings(
        make_ring(q_buffers),
        make_shared_ring(k_buffers, CONSUMERS),
        make_shared_ring(v_buffers, CONSUMERS),
    )
    pass_turn(CONSUMERS - 1, CONSUMERS)  # so the first consumer's is the first
    work = Work(q_heads, q_len, kv_len, tiles, blocks, bundles, section)
    descriptors = (q_desc, k_desc, v_desc)
    attend = (rings, (o_buffers, o_desc, lse), work, scale)
    # The first consumer is the program's own four warps. Gluon wants every list written out.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, rings, work, group, HEADS, IS_CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 2, HEADS, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, rings, work, group, HEADS, IS_CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 2, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 3, HEADS, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, rings, work, group, HEADS, IS_CAUSAL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def _load(descriptors, rings, work, group, HEADS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The loading warp: all blocks of all tiles, as soon as there is room."""
    q_desc, k_desc, v_desc = descriptors
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[3]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    count = 0  # key blocks so far, of all tiles
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        head, block = tile_of(turn, work, HEADS, IS_CAUSAL)
        batch, q_head = head // work.q_heads, head % work.q_heads
        kv_head = q_head // group
        first = block * QUERIES
        blocks, _ = key_blocks(first, work.kv_len, QUERIES, KEYS, IS_CAUSAL)
        for who in gl.static_range(CONSUMERS):
            own = [batch, q_head + who % HEADS, first + who // HEADS * ROWS, 0]
            fill(rings.query, q_desc, own, who, turn)
        for i in range(blocks):
            key = (blocks - 1 - i) * KEYS
            stage, phase = count % STAGES, count // STAGES
            at = [batch, kv_head, key, 0]
            fill_shared(rings.key, k_desc, at, stage, phase, KEY, CONSUMERS)
            fill_shared(rings.value, v_desc, at, stage, phase, VALUE, CONSUMERS)
            count += 1


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Consumer number WHO: 64 queries of every tile."""
    rings, outputs, work, scale = arguments
    o_buffers, o_desc, lse = outputs
    kv_len = work.kv_len
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    KEYS: gl.constexpr = rings.key.buffers.shape[3]
    HEAD_DIM: gl.constexpr = rings.key.buffers.shape[4]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    count = 0
    for turn in range(turns_of(work.tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        head, block = tile_of(turn, work, HEADS, IS_CAUSAL)
        batch, q_head = head // work.q_heads, head % work.q_heads + WHO % HEADS
        blocks, unmasked = key_blocks(block * QUERIES, kv_len, QUERIES, KEYS, IS_CAUSAL)
        first = block * QUERIES + WHO // HEADS * ROWS
        wait_for(rings.query, WHO, turn)
        q = _matrix(rings.query.buffers.index(WHO))

        # The last block of keys, which has no PV before it.
        stage = count % STAGES
        wait_for(rings.key, stage, count // STAGES)
        wait_for_turn(WHO)
        scores = start_scores(q, _matrix(rings.key.buffers.index(stage)))
        pass_turn(WHO, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release_shared(rings.key, stage, KEY, CONSUMERS)
        seen = may_see(scores, first, (blocks - 1) * KEYS, kv_len, IS_CAUSAL)
        scores = gl.where(seen, scores, float("-inf"))
        nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
        scores, largest, _ = _softmax(scores, nothing, scale, True)
        total = own_sums(scores)
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
        state = (_pack(scores, q.dtype), output, largest, total)
        count += 1
        # Blocks that some of the queries do not see whole, and those that all do.
        for i in range(1, blocks - unmasked):
            key = (blocks - 1 - i) * KEYS
            state = _step(state, rings, count, first, key, kv_len, scale, WHO, IS_CAUSAL, True)
            count += 1
        for _ in range(blocks - unmasked, blocks):
            state = _step(state, rings, count, first, 0, kv_len, scale, WHO, IS_CAUSAL, False)
            count += 1
        release(rings.query, WHO)

        # PV of the block visited last, and the output.
        packed, output, largest, sums = state
        total = gl.sum(sums, 1)
        probabilities = _unpack(packed, output, q.dtype)
        stage = (count - 1) % STAGES
        wait_for(rings.value, stage, (count - 1) // STAGES)
        values = _matrix(rings.value.buffers.index(stage))
        output = warpgroup_mma(probabilities, values, output, is_async=True)
        output = warpgroup_mma_wait(0, deps=[output])
        release_shared(rings.value, stage, VALUE, CONSUMERS)
        output *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, LAYOUT))[:, None]
        o_buffer = o_buffers.index(WHO)
        tma.store_wait(0)  # that of the tile before, which still reads this memory
        _matrix(o_buffer).store(output.to(q.dtype))
        fence_async_shared()
        tma_store(o_desc, [batch, q_head, first, 0], o_buffer)
        if HAS_LSE:
            total = gl.convert_layout(total, largest.type.layout)
            query = first + gl.arange(0, ROWS, total.type.layout)
            start = (batch * work.q_heads + q_head).to(gl.int64) * work.q_len
            gl.store(lse + start + query, (largest + gl.log2(total)) * LN_2, query < work.q_len)
    tma.store_wait(0)


@gluon.jit
def _step(
    state,
    rings,
    count,
    first_query,
    first_key,
    kv_len,
    scale,
    WHO: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_MASKED: gl.constexpr,
):
    """The scores and softmax of block number `count`, and PV of the block before it."""
    packed, output, largest, total = state
    dtype: gl.constexpr = rings.value.buffers.dtype
    CONSUMERS: gl.constexpr = rings.query.buffers.shape[0]
    STAGES: gl.constexpr = rings.key.buffers.shape[0]
    stage = count % STAGES
    before = (count - 1) % STAGES
    probabilities = _unpack(packed, output, dtype)
    wait_for(rings.key, stage, count // STAGES)
    wait_for_turn(WHO)
    q = _matrix(rings.query.buffers.index(WHO))
    scores = start_scores(q, _matrix(rings.key.buffers.index(stage)))
    wait_for(rings.value, before, (count - 1) // STAGES)
    values = _matrix(rings.value.buffers.index(before))
    output = warpgroup_mma(probabilities, values, output, is_async=True)
    pass_turn(WHO, CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    release_shared(rings.key, stage, KEY, CONSUMERS)
    if IS_MASKED:
        seen = may_see(scores, first_query, first_key, kv_len, IS_CAUSAL)
        scores = gl.where(seen, scores, float("-inf"))
    scores, largest, factor = _softmax(scores, largest, scale, IS_MASKED)
    sums = own_sums(scores)
    total = total * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    # `probabilities` is read until here: their registers must not be reused before.
    output, scores, packed = warpgroup_mma_wait(0, deps=[output, scores, packed])
    release_shared(rings.value, before, VALUE, CONSUMERS)
    output *= gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout))[:, None]
    return _pack(scores, dtype), output, largest, total


@gluon.jit
def _matrix(block):
    """(rows, D) of a block of four dimensions, as descriptors have them."""
    return block.reshape((block.shape[2], block.shape[3]))


@gluon.jit
def _softmax(scores, largest, scale, IS_MASKED: gl.constexpr):
    """The exponentials of a block, the new maximum, and the factor for what was summed before.

    The maximum is of scale · score; a row that has not seen a key yet has -inf, which subtracted
    from -inf would be NaN.
    """
    new_largest = gl.maximum(largest, gl.max(scores, 1) * scale)
    subtracted = new_largest
    if IS_MASKED:
        subtracted = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    factor = gl.exp2(largest - subtracted)
    return gl.exp2(scores * scale - subtracted[:, None]), new_largest, factor


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Neighbours in one register, (ROWS, KEYS / 2) int32.

    Values of 16 bits that are carried from one block to the next have a register each, and would be
    put together each time.
    """
    TO: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    left, right = gl.split(weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)))
    CONVERT: gl.constexpr = "cvt.rn." + TO + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        CONVERT, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(packed, output, dtype: gl.constexpr):
    """As PV takes them, (ROWS, KEYS)."""
    left, right = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [packed],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, output.type.layout, 2)
    weights = gl.join(left, right).reshape((packed.shape[0], packed.shape[1] * 2))
    return gl.convert_layout(weights.to(dtype, bitcast=True), LAYOUT, assert_trivial=True)
