"""FlashAttention 3's backward pass (Shah et al. 2024) for Hopper GPUs, in Gluon.

A program has a tile of 128 keys and values, which stay in shared memory. It computes their
gradients, and adds parts of dQ to sums in float32 (`query_gradients.py`). One warp loads blocks of
queries and of dO, of all heads that share the key head. Two warp groups ("consumers") have 64 keys
each. For each block, with P and dS transposed, so that they are left operands in registers:

    Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ       each consumer, for its keys
    P = 2^(S·scale − lse), dS = P·(dP − δ)
    dV += Pᵀ·dO, dK += dSᵀ·Q     each consumer, for its keys
    dQ += dS·K                   half of the product per consumer, for all keys

The last product needs dS of both consumers, so they exchange dS through shared memory. If D is 128,
it comes one block late, before the next block's scores: a consumer then seldom waits for the other
one, and the two need not compute their exponentials at the same time. If D is 64, where blocks are
twice as long, that takes more registers than there are. dS is stored in two buffers in turn.

The head dimensions of a call may be smaller than D. TMA then fills the columns with zeros.

A packed call has a whole number of blocks and tiles of each sequence (`key_ranges.sequence_at`).
Rows after the end of a sequence belong to another one or to none, and may be NaN. They are cleared
in shared memory, and the log-sum-exp of such queries is infinite, so that their weights are zero.

Barriers. Those of `backward_tiles.Barriers`, and the named barriers from EXCHANGE on:

- If D is 64, 256 threads meet at the first one when both consumers have stored dS.
- If D is 128, each consumer has two in turn: it arrives when it has stored dS of a block and
  finished dQ of the block before, and the other one waits for it before dQ of the block. A consumer
  that stores dS has thus waited until the other one has read the dS that was in the buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention_kernels.hopper.backward_tiles import (
    STAGES,
    Barriers,
    Call,
    hide_unseen,
    load_tile,
    store_gradients,
    tile_of,
)
from attention_kernels.hopper.key_ranges import CallBounds
from attention_kernels.hopper.pipeline import (
    FIRST_NUMBER,
    LOADER_REGISTERS,
    WARP_GROUP,
    clear,
    make_barriers,
    named_barrier,
)
from attention_kernels.hopper.query_gradients import CHUNK_ROWS, COLUMNS, SIDE, add_chunk
from attention_kernels.hopper.scores import ROWS, add_scores, matrix, start_scores
from attention_kernels.hopper.special_functions import TANH, approximately

KEYS = gl.constexpr(128)
"""Number of keys of a program: ROWS of each of two consumers."""
EXCHANGE = gl.constexpr(FIRST_NUMBER.value)
"""Number of the first named barrier for the exchange of dS."""


class Buffers(NamedTuple):
    """Blocks in shared memory. M is the number of queries in a block."""

    key: Any
    """(1, 1, KEYS, D)"""
    value: Any
    query: Any
    """(STAGES, 1, 1, M, D)"""
    grad_output: Any
    logarithms: Any
    """(STAGES, M), the log-sum-exp of each query in base 2."""
    deltas: Any
    """(STAGES, M), δ of each query."""
    slopes: Any
    """(2, KEYS, M), dSᵀ."""
    sums: Any
    """(2, CHUNK_ROWS, COLUMNS), each consumer's part of dQ."""


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "sequences", "blocks", "kv_heads", "group",
        "tiles", "head_group",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_output_desc,
    logarithms_desc,
    deltas_desc,
    sums_desc,
    grad_key,
    grad_value,
    q_offsets,
    k_starts,
    k_lengths,
    scale,
    cap,
    grad_scale,
    q_len,
    k_len,
    diagonal,
    left,
    right,
    sequences,
    blocks,
    kv_heads,
    group,
    tiles,
    head_group,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    REGISTERS: gl.constexpr,
    MASKED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Compute dK and dV of a tile of keys, and add the tile's part to dQ.

    The strides are those of `grad_key` and `grad_value`. MASKED: some tile is cut by the end of the
    keys or by a side of the window. `q_offsets`, `k_starts`, `k_lengths`, `q_len`, `k_len`,
    `diagonal`, `left` and `right` are those of `CallBounds`; `tiles` is the number of tiles of a
    head, of all sequences. Rows of `logarithms` and `deltas` have `blocks` whole blocks.
    Programs run in the order of their numbers, `head_group` heads at a time, a divisor of B · Hkv,
    so that queries stay in the L2 cache. Within a group, the first tiles come first, which are the
    longest in causal calls.
    """
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = q_desc.block_type.shape[2]
    Q_BLOCKS: gl.constexpr = [STAGES] + q_desc.block_type.shape  # noqa: RUF005 (Gluon has no such syntax)
    SLOPES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout),
        gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout),
        gl.allocate_shared_memory(dtype, Q_BLOCKS, q_desc.layout),
        gl.allocate_shared_memory(dtype, Q_BLOCKS, grad_output_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], logarithms_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], deltas_desc.layout),
        gl.allocate_shared_memory(dtype, [2, KEYS, M], SLOPES),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK_ROWS, COLUMNS], sums_desc.layout),
    )
    barriers = Barriers(
        make_barriers(1, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 2),
    )
    bounds = CallBounds(
        q_len, k_len, diagonal, left, right, None, q_offsets, k_starts, k_lengths
    )  # fmt: skip
    call = Call(scale, cap, grad_scale, bounds, sequences, blocks, kv_heads, group)
    tile = tile_of(gl.program_id(0), call, tiles, head_group, M, KEYS)
    load = (q_desc, k_desc, v_desc, grad_output_desc, logarithms_desc, deltas_desc)
    of_keys = (grad_key, stride_kb, stride_kh, stride_kn)
    of_values = (grad_value, stride_vb, stride_vh, stride_vn)
    compute = (buffers, barriers, tile, call, sums_desc, of_keys, of_values)
    # The first consumer is the program's own four warps.
    gl.warp_specialize(
        [
            (_compute, (compute, 0, MASKED, HEAD_DIM, V_HEAD_DIM)),
            (_compute, (compute, 1, MASKED, HEAD_DIM, V_HEAD_DIM)),
            (load_tile, (load, buffers, barriers, tile, call)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _compute(
    arguments,
    WHO: gl.constexpr,
    MASKED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_HEAD_DIM: gl.constexpr,
):
    """Run consumer number WHO: compute dK and dV of its keys, and its half of each block's dQ."""
    buffers, barriers, tile, call, sums_desc, of_keys, of_values = arguments
    D: gl.constexpr = buffers.key.shape[3]
    M: gl.constexpr = buffers.query.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    mbarrier.wait(barriers.key_value.index(0), 0)
    own_values = matrix(buffers.value).slice(WHO * ROWS, ROWS, dim=0)
    IS_PACKED: gl.constexpr = call.bounds.q_offsets is not None
    if IS_PACKED:
        left_over = tile.element.kv_len - tile.first_key
        if left_over < KEYS:
            clear(matrix(buffers.key), left_over)
            clear(own_values, left_over - WHO * ROWS)
    head = (tile.batch * call.kv_heads + tile.kv_head) * call.group
    chunk = (head * call.blocks + tile.begin) * 2 + WHO
    if _is_late(D):
        # No block precedes the first one. Its dQ is zero, and is added to the first block's.
        own_slopes = buffers.slopes.index(1).slice(WHO * ROWS, ROWS, dim=0)
        own_slopes.store(gl.zeros([ROWS, M], gl.float32, LAYOUT).to(buffers.key.dtype))
        fence_async_shared()
        _tell_stored(-1, WHO)
    count = 0
    for member in range(call.group):
        shared = (buffers, barriers, tile, call, sums_desc, head + member)
        if MASKED:
            for turn in range(tile.begin, tile.whole + tile.cut):
                block = turn
                if IS_PACKED:
                    block = gl.where(turn < tile.whole, turn, tile.end)
                dk, dv, chunk = _step(dk, dv, chunk, block, count, shared, WHO, True, IS_PACKED)
                count += 1
        for block in range(tile.whole, tile.whole_end):
            dk, dv, chunk = _step(dk, dv, chunk, block, count, shared, WHO, False, False)
            count += 1
        if call.bounds.left is not None:
            for block in range(tile.whole_end, tile.end):
                dk, dv, chunk = _step(dk, dv, chunk, block, count, shared, WHO, True, False)
                count += 1
    if _is_late(D):
        tma.store_wait(0)
        _wait_stored(count - 1, WHO)
        dq = _start_dq(buffers.slopes.index((count + 1) % 2), matrix(buffers.key), WHO)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if count > 0:
            add_chunk(dq, sums_desc, chunk, buffers.sums.index(WHO))
    # No warp reads the consumer's values after the consumers have met in the last block.
    store_gradients(dv, own_values, of_values, tile, WHO, V_HEAD_DIM)
    store_gradients(dk * call.grad_scale, own_values, of_keys, tile, WHO, HEAD_DIM)
    tma.store_wait(0)  # the memory belongs to another program after the end


@constexpr_function
def _is_late(head_dim):
    """Return whether dQ of a block is computed in the next block."""
    return head_dim > 64


@gluon.jit
def _step(
    dk,
    dv,
    chunk,
    block,
    count,
    shared,
    WHO: gl.constexpr,
    IS_MASKED: gl.constexpr,
    MAY_BE_CUT: gl.constexpr,
):
    """Return dK and dV (ROWS, D) with the parts of a block added, and the number of the block's
    chunk of dQ. The block's part of dQ is added, or that of the block before, in `chunk`.
    MAY_BE_CUT: rows of the block may belong to another sequence."""
    buffers, barriers, tile, call, sums_desc, head = shared
    dtype: gl.constexpr = buffers.key.dtype
    M: gl.constexpr = buffers.query.shape[3]
    IS_LATE: gl.constexpr = _is_late(buffers.key.shape[3])
    stage, phase = count % STAGES, count // STAGES & 1
    query = matrix(buffers.query.index(stage))
    grad_output = matrix(buffers.grad_output.index(stage))
    key = matrix(buffers.key)
    own_keys = key.slice(WHO * ROWS, ROWS, dim=0)
    own_values = matrix(buffers.value).slice(WHO * ROWS, ROWS, dim=0)
    sums = buffers.sums.index(WHO)
    if MAY_BE_CUT:
        left_over = tile.element.q_len - block * M
        if left_over < M:
            mbarrier.wait(barriers.query.index(stage), phase)
            mbarrier.wait(barriers.grad_output.index(stage), phase)
            clear(query, left_over)
            clear(grad_output, left_over)
    if IS_LATE:
        tma.store_wait(0)  # the previous part of dQ, read before the warps meet
        _wait_stored(count - 1, WHO)
        dq = _start_dq(buffers.slopes.index((count + 1) % 2), key, WHO)
        mbarrier.wait(barriers.query.index(stage), phase)
        scores = start_scores(own_keys, query)
        dq = warpgroup_mma_wait(1, deps=[dq])
        add_chunk(dq, sums_desc, chunk, sums)
    else:
        mbarrier.wait(barriers.query.index(stage), phase)
        scores = start_scores(own_keys, query)
    chunk = (head * call.blocks + block) * 2 + WHO
    mbarrier.wait(barriers.grad_output.index(stage), phase)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    deltas = buffers.deltas.index(stage).load(OF_COLUMN)
    start, _ = gl.broadcast(-deltas[None, :], gl.zeros([ROWS, M], gl.float32, LAYOUT))
    grad_weights = add_scores(start, own_values, grad_output)
    logarithms = buffers.logarithms.index(stage).load(OF_COLUMN)
    scores = warpgroup_mma_wait(1, deps=[scores])
    scale = call.scale
    if call.cap is not None:
        scores = approximately(TANH, scores * scale)  # as in the forward pass
        factor = 1.0 - scores * scores  # before scores are hidden: ∞² · 0 would be NaN
        scale = call.cap
    if IS_MASKED:
        scores = hide_unseen(scores, block * M, tile, call, WHO)
    weights = gl.exp2(scores * scale - logarithms[None, :])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    packed = gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)
    if call.cap is not None:
        weights *= factor
    dv = warpgroup_mma(packed, grad_output, dv, is_async=True)
    grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
    slopes = (weights * grad_weights).to(dtype)
    block_slopes = buffers.slopes.index(count % 2)
    block_slopes.slice(WHO * ROWS, ROWS, dim=0).store(slopes)
    slopes = gl.convert_layout(slopes, OPERAND, assert_trivial=True)
    fence_async_shared()
    if IS_LATE:
        _tell_stored(count, WHO)
        dk = warpgroup_mma(slopes, query, dk, is_async=True)
    else:
        tma.store_wait(0)
        named_barrier("bar.sync", gl.to_tensor(EXCHANGE), gl.to_tensor(2 * WARP_GROUP))
        dq = _start_dq(block_slopes, key, WHO)
        dv, packed = warpgroup_mma_wait(1, deps=[dv, packed])
        dk = warpgroup_mma(slopes, query, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        add_chunk(dq, sums_desc, chunk, sums)
    dk, dv, slopes, packed = warpgroup_mma_wait(0, deps=[dk, dv, slopes, packed])
    mbarrier.arrive(barriers.empty.index(stage), count=1)
    return dk, dv, chunk


@gluon.jit
def _tell_stored(count, WHO: gl.constexpr):
    """Tell the other consumer that dS of block number `count` is stored."""
    number = gl.to_tensor(EXCHANGE + 2 * WHO) + (count & 1)
    named_barrier("bar.arrive", number, gl.to_tensor(2 * WARP_GROUP))


@gluon.jit
def _wait_stored(count, WHO: gl.constexpr):
    """Wait until the other consumer has stored dS of block number `count`."""
    number = gl.to_tensor(EXCHANGE + 2 * (1 - WHO)) + (count & 1)
    named_barrier("bar.sync", number, gl.to_tensor(2 * WARP_GROUP))


@gluon.jit
def _start_dq(slopes, key, WHO: gl.constexpr):
    """Start a consumer's half of dS·K, (64, 64), from dSᵀ (KEYS, M) and keys (KEYS, D): half of the
    columns of 64 queries if D is 128, half of 128 queries if D is 64."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    nothing = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    if key.shape[1] == SIDE:
        slopes = slopes.slice(WHO * SIDE, SIDE, dim=1)
    else:
        key = key.slice(WHO * SIDE, SIDE, dim=1)
    return warpgroup_mma(slopes.permute((1, 0)), key, nothing, use_acc=False, is_async=True)
