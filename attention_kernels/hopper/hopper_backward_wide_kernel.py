"""Backward pass for Hopper GPUs at head dimensions above 128, in Gluon.

A program has a tile of 64 keys and values, which stay in shared memory. The gradients of more keys
would fill all registers at D = 256. One warp loads blocks of 64 queries and of dO, of all heads
that share the key head. Two warp groups divide the products by gradient, not by keys. The left
operand of each gradient is then in the registers of the group that needs it:

    group of the values                 group of the keys
    Sᵀ = K·Qᵀ                           dPᵀ = V·dOᵀ
    P = 2^(S·scale − lse)    ── P ──>   dS = P·(dP − δ)
    dV += Pᵀ·dO             <── dS ──   dK += dSᵀ·Q
    dQ += dS·K, first columns           dQ += dS·K, other columns

P and dS are exchanged in 16 bits through shared memory. dQ comes one block late and in pieces of 64
columns. The first piece runs behind the scores, the second one behind dV or dK. A piece is added to
sums in float32 straight from the registers (`query_gradients.py`): two blocks of queries and two of
dO leave no shared memory for it, whose bandwidth is the limit before the tensor cores.

Blocks of head dimension 192 have 256 columns in shared memory, because sizes are powers of two. TMA
fills the last 64 with zeros. Products read 128 columns and then 64.

Barriers. Those of `backward_tiles.Barriers`, and two named ones. At WEIGHTS and SLOPES, the group
that has stored P or dS of a block arrives, and the other one waits:

- The group of the values waits for dS of the block before, and then stores P. The other group has
  read the P before it by then, so that P needs only one buffer, and each barrier one number.
- The group of the keys waits for P, and then stores dS in one of two buffers. The other group has
  by then finished dQ of the block whose dS was there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
    make_barriers,
    meet,
    named_barrier,
)
from attention_kernels.hopper.query_gradients import SIDE, add_from_registers
from attention_kernels.hopper.scores import ROWS, add_scores, matrix, start_scores

WEIGHTS = gl.constexpr(FIRST_NUMBER.value)
"""Number of the named barrier at which P is stored."""
SLOPES = gl.constexpr(FIRST_NUMBER.value + 1)
"""Number of the named barrier at which dS is stored."""


class Buffers(NamedTuple):
    """Blocks in shared memory. M is the number of queries in a block, D the number of columns of
    queries and keys, DV that of values and dO."""

    key: Any
    """(1, 1, ROWS, D)"""
    value: Any
    """(1, 1, ROWS, DV)"""
    query: Any
    """(STAGES, 1, 1, M, D)"""
    grad_output: Any
    """(STAGES, 1, 1, M, DV)"""
    logarithms: Any
    """(STAGES, M), the log-sum-exp of each query in base 2."""
    deltas: Any
    """(STAGES, M), δ of each query."""
    weights: Any
    """(ROWS, M), Pᵀ."""
    slopes: Any
    """(2, ROWS, M), dSᵀ."""


class Program(NamedTuple):
    """Memory, barriers and numbers of both groups."""

    buffers: Any
    barriers: Any
    tile: Any
    call: Any
    sums: Any
    """Pointer to the sums of dQ."""


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "blocks", "kv_heads", "group", "tiles",
        "head_group",
    ]
)  # fmt: skip
def wide_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_output_desc,
    logarithms_desc,
    deltas_desc,
    sums,
    grad_key,
    grad_value,
    scale,
    grad_scale,
    q_len,
    k_len,
    diagonal,
    left,
    right,
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
    HEAD_DIM: gl.constexpr,
    REGISTERS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Compute dK and dV of a tile of keys, and add the tile's part to dQ.

    HEAD_DIM is that of queries and keys. Other arguments are those of `backward_kernel`, but `sums`
    is a pointer.
    """
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = q_desc.block_type.shape[2]
    Q_BLOCKS: gl.constexpr = [STAGES] + q_desc.block_type.shape  # noqa: RUF005 (Gluon has no such syntax)
    G_BLOCKS: gl.constexpr = [STAGES] + grad_output_desc.block_type.shape  # noqa: RUF005
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout),
        gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout),
        gl.allocate_shared_memory(dtype, Q_BLOCKS, q_desc.layout),
        gl.allocate_shared_memory(dtype, G_BLOCKS, grad_output_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], logarithms_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, M], deltas_desc.layout),
        gl.allocate_shared_memory(dtype, [ROWS, M], SHARED),
        gl.allocate_shared_memory(dtype, [2, ROWS, M], SHARED),
    )
    barriers = Barriers(
        make_barriers(1, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 2),
    )
    bounds = CallBounds(q_len, k_len, diagonal, left, right)
    call = Call(scale, None, grad_scale, bounds, None, blocks, kv_heads, group)
    tile = tile_of(gl.program_id(0), call, tiles, head_group, M, ROWS)
    descriptors = (q_desc, k_desc, v_desc, grad_output_desc, logarithms_desc, deltas_desc)
    of_keys = (grad_key, stride_kb, stride_kh, stride_kn)
    of_values = (grad_value, stride_vb, stride_vh, stride_vn)
    program = Program(buffers, barriers, tile, call, sums)
    # The first group is the program's own four warps.
    gl.warp_specialize(
        [
            (_compute_values, (program, of_values, HEAD_DIM, MASKED)),
            (_compute_keys, (program, of_keys, HEAD_DIM)),
            (load_tile, (descriptors, buffers, barriers, tile, call)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _compute_values(program, of_values, D: gl.constexpr, MASKED: gl.constexpr):
    """Run the group of the values: compute dV, and the first columns of each block's dQ."""
    buffers = program.buffers
    tile = program.tile
    call = program.call
    END: gl.constexpr = _pieces_of_values(D)
    dv = _zeros(buffers.value.shape[3])
    mbarrier.wait(program.barriers.key_value.index(0), 0)
    head = (tile.batch * call.kv_heads + tile.kv_head) * call.group
    # No block precedes the first one. Its dQ is zero, and is added to the first block's.
    late = head * call.blocks + tile.begin
    count = 0
    for member in range(call.group):
        first = (head + member) * call.blocks
        if MASKED:
            for block in range(tile.begin, tile.whole):
                dv = _step_of_values(dv, late, block, count, program, D, True)
                late = first + block
                count += 1
        for block in range(tile.whole, tile.whole_end):
            dv = _step_of_values(dv, late, block, count, program, D, False)
            late = first + block
            count += 1
        if call.bounds.left is not None:
            for block in range(tile.whole_end, tile.end):
                dv = _step_of_values(dv, late, block, count, program, D, True)
                late = first + block
                count += 1
    _wait(SLOPES)
    _add_last_dq(late, count, program, 0, END, D)
    # The other group has read the values, because it has stored dS of the last block.
    _store_all(dv, matrix(buffers.value), of_values, tile)


@gluon.jit
def _step_of_values(
    dv, late, block, count, program, D: gl.constexpr, IS_MASKED: gl.constexpr
):  # fmt: skip
    """Return dV with the part of a block added, and add dQ of block number `late` of all heads."""
    buffers = program.buffers
    barriers = program.barriers
    call = program.call
    dtype: gl.constexpr = buffers.key.dtype
    M: gl.constexpr = buffers.query.shape[3]
    END: gl.constexpr = _pieces_of_values(D)
    stage, phase = count % STAGES, count // STAGES & 1
    key = matrix(buffers.key)
    query = matrix(buffers.query.index(stage))
    grad_output = matrix(buffers.grad_output.index(stage))
    late_slopes = buffers.slopes.index((count + 1) % 2)
    mbarrier.wait(barriers.query.index(stage), phase)
    MAIN: gl.constexpr = _main(D)
    scores = start_scores(key.slice(0, MAIN, dim=1), query.slice(0, MAIN, dim=1))
    if MAIN < D:
        rest = key.slice(MAIN, D - MAIN, dim=1)
        scores = add_scores(scores, rest, query.slice(MAIN, D - MAIN, dim=1))
    _wait(SLOPES)
    dq = _start_dq(late_slopes, key, 0)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    logarithms = buffers.logarithms.index(stage).load(gl.SliceLayout(0, LAYOUT))
    scores = warpgroup_mma_wait(1, deps=[scores])
    if IS_MASKED:
        scores = hide_unseen(scores, block * M, program.tile, call, 0)
    weights = gl.exp2(scores * call.scale - logarithms[None, :]).to(dtype)
    buffers.weights.store(weights)
    _tell(WEIGHTS)
    mbarrier.wait(barriers.grad_output.index(stage), phase)
    return _add_products(
        dv, weights, grad_output, dq, late, program, late_slopes, stage, 0, END, D
    )  # fmt: skip


@gluon.jit
def _compute_keys(program, of_keys, D: gl.constexpr):
    """Run the group of the keys: compute dK, and the other columns of each block's dQ."""
    buffers = program.buffers
    tile = program.tile
    call = program.call
    M: gl.constexpr = buffers.query.shape[3]
    BEGIN: gl.constexpr = _pieces_of_values(D)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    dk = _zeros(D)
    mbarrier.wait(program.barriers.key_value.index(0), 0)
    buffers.slopes.index(1).store(gl.zeros([ROWS, M], gl.float32, LAYOUT).to(buffers.key.dtype))
    fence_async_shared()
    meet()
    _tell(SLOPES)
    head = (tile.batch * call.kv_heads + tile.kv_head) * call.group
    late = head * call.blocks + tile.begin
    count = 0
    for member in range(call.group):
        first = (head + member) * call.blocks
        for block in range(tile.begin, tile.end):
            dk = _step_of_keys(dk, late, count, program, D)
            late = first + block
            count += 1
    _add_last_dq(late, count, program, BEGIN, D // SIDE, D)
    # The other group has read the queries, because it has stored P of the last block.
    _store_all(_scaled(dk, call.grad_scale), matrix(buffers.query.index(0)), of_keys, tile)


@gluon.jit
def _step_of_keys(dk, late, count, program, D: gl.constexpr):
    """Return dK with the part of a block added, and add dQ of block number `late` of all heads."""
    buffers = program.buffers
    barriers = program.barriers
    dtype: gl.constexpr = buffers.key.dtype
    M: gl.constexpr = buffers.query.shape[3]
    BEGIN: gl.constexpr = _pieces_of_values(D)
    stage, phase = count % STAGES, count // STAGES & 1
    query = matrix(buffers.query.index(stage))
    grad_output = matrix(buffers.grad_output.index(stage))
    late_slopes = buffers.slopes.index((count + 1) % 2)
    mbarrier.wait(barriers.grad_output.index(stage), phase)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    deltas = buffers.deltas.index(stage).load(gl.SliceLayout(0, LAYOUT))
    start, _ = gl.broadcast(-deltas[None, :], gl.zeros([ROWS, M], gl.float32, LAYOUT))
    grad_weights = add_scores(start, matrix(buffers.value), grad_output)
    dq = _start_dq(late_slopes, matrix(buffers.key), BEGIN)
    grad_weights = warpgroup_mma_wait(1, deps=[grad_weights])
    _wait(WEIGHTS)
    weights = buffers.weights.load(LAYOUT).to(gl.float32)
    slopes = (weights * grad_weights).to(dtype)
    buffers.slopes.index(count % 2).store(slopes)
    fence_async_shared()
    _tell(SLOPES)
    mbarrier.wait(barriers.query.index(stage), phase)
    return _add_products(
        dk, slopes, query, dq, late, program, late_slopes, stage, BEGIN, D // SIDE, D
    )  # fmt: skip


@gluon.jit
def _add_products(
    gradients, left, block, dq, late, program, late_slopes, stage,
    BEGIN: gl.constexpr, END: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Return gradients with `left` (ROWS, M) times `block` (M, …) added.

    Meanwhile, add the pieces BEGIN to END of dQ of block number `late`; the caller has started the
    first one. Then release the buffers of the stage.
    """
    buffers = program.buffers
    MAIN: gl.constexpr = gradients[0].shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradients[0].type.layout, 2)
    packed = gl.convert_layout(left, OPERAND, assert_trivial=True)
    main = warpgroup_mma(packed, block.slice(0, MAIN, dim=1), gradients[0], is_async=True)
    chunk = late * (D // SIDE)
    if len(gradients) == 1:
        dq = warpgroup_mma_wait(1, deps=[dq])
        add_from_registers(dq, program.sums, chunk + BEGIN)
        if END - BEGIN == 2:
            dq = _start_dq(late_slopes, matrix(buffers.key), BEGIN + 1)
        main, packed, dq = warpgroup_mma_wait(0, deps=[main, packed, dq])
        gradients = (main,)
    else:
        REST: gl.constexpr = gradients[1].shape[1]
        REST_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradients[1].type.layout, 2)
        again = gl.convert_layout(left, REST_OPERAND, assert_trivial=True)
        columns = block.slice(MAIN, REST, dim=1)
        rest = warpgroup_mma(again, columns, gradients[1], is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq])
        add_from_registers(dq, program.sums, chunk + BEGIN)
        if END - BEGIN == 2:
            dq = _start_dq(late_slopes, matrix(buffers.key), BEGIN + 1)
        main, rest, packed, again, dq = warpgroup_mma_wait(
            0, deps=[main, rest, packed, again, dq]
        )  # fmt: skip
        gradients = (main, rest)
    mbarrier.arrive(program.barriers.empty.index(stage), count=1)
    if END - BEGIN == 2:
        add_from_registers(dq, program.sums, chunk + BEGIN + 1)
    return gradients


@gluon.jit
def _add_last_dq(
    late, count, program, BEGIN: gl.constexpr, END: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Add the pieces BEGIN to END of dQ of the last block, if there is any."""
    buffers = program.buffers
    slopes = buffers.slopes.index((count + 1) % 2)
    for piece in gl.static_range(BEGIN, END):
        dq = _start_dq(slopes, matrix(buffers.key), piece)
        dq = warpgroup_mma_wait(0, deps=[dq])
        if count > 0:
            add_from_registers(dq, program.sums, late * (D // SIDE) + piece)


@gluon.jit
def _start_dq(slopes, key, PIECE: gl.constexpr):
    """Start 64 columns of dS·K, (SIDE, SIDE), from dSᵀ (ROWS, M) and keys (ROWS, D)."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    nothing = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    columns = key.slice(PIECE * SIDE, SIDE, dim=1)
    return warpgroup_mma(slopes.permute((1, 0)), columns, nothing, use_acc=False, is_async=True)


@constexpr_function
def _main(head_dim):
    """Return the number of columns of the first piece, a power of two. A second has the others."""
    return 128 if head_dim == 192 else head_dim


@constexpr_function
def _pieces_of_values(head_dim):
    """Return how many pieces of dQ the group of the values computes."""
    return head_dim // 64 // 2


@gluon.jit
def _zeros(D: gl.constexpr):
    """Return gradients of zero: (ROWS, D) float32, in one or two pieces."""
    MAIN: gl.constexpr = _main(D)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    main = gl.zeros([ROWS, MAIN], gl.float32, LAYOUT)
    if MAIN == D:
        return (main,)
    else:
        OF_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D - MAIN, 16])
        return main, gl.zeros([ROWS, D - MAIN], gl.float32, OF_REST)


@gluon.jit
def _scaled(gradients, factor):
    if len(gradients) == 1:
        return (gradients[0] * factor,)
    else:
        return gradients[0] * factor, gradients[1] * factor


@gluon.jit
def _store_all(gradients, buffer, target, tile):
    """Store gradients (ROWS, D), in one or two pieces, through `buffer`."""
    MAIN: gl.constexpr = gradients[0].shape[1]
    store_gradients(gradients[0], buffer.slice(0, MAIN, dim=1), target, tile, 0, MAIN)
    if len(gradients) == 2:
        pointer, stride_batch, stride_head, stride_row = target
        of_rest = (pointer + MAIN, stride_batch, stride_head, stride_row)
        REST: gl.constexpr = gradients[1].shape[1]
        store_gradients(gradients[1], buffer.slice(MAIN, REST, dim=1), of_rest, tile, 0, REST)


@gluon.jit
def _tell(NUMBER: gl.constexpr):
    """Arrive at a named barrier of both groups."""
    named_barrier("bar.arrive", gl.to_tensor(NUMBER), gl.to_tensor(2 * WARP_GROUP))


@gluon.jit
def _wait(NUMBER: gl.constexpr):
    """Wait at a named barrier of both groups."""
    named_barrier("bar.sync", gl.to_tensor(NUMBER), gl.to_tensor(2 * WARP_GROUP))
