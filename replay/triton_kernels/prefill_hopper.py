"""Prefill for Hopper GPUs (compute capability 9.0), in Gluon, Triton's lower-level language.

FlashAttention 3's schedule (Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with
Asynchrony and Low-precision"):

- One warp loads tiles of query, key and value with the tensor memory accelerator (TMA), and the
  warp groups that compute ("consumers") wait for them at barriers in shared memory.
- A consumer has 64 queries. It starts QKᵀ of the next block of keys and PV of this one together,
  and computes the next one's softmax while PV is still running.
- Consumers take turns at starting their products, so that one's softmax runs beside another's.
- The grid is persistent: the loads of a program's next tile begin while this one is finished.

Blocks of keys are visited from the last to the first, so that those which need a mask, the last
ones, come before a loop without any.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, overload

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

ROWS = gl.constexpr(64)
"""Queries of a consumer: what one warp group's matrix instruction takes."""
LN_2 = gl.constexpr(math.log(2))
LOADER_REGISTERS = gl.constexpr(24)

# Renamed between the Triton versions that we support.
_new_names = hasattr(tma, "async_store")
_tma_load = tma.async_load if _new_names else tma.async_copy_global_to_shared
_tma_store = tma.async_store if _new_names else tma.async_copy_shared_to_global


@gluon.jit
def tile_of(number, work, IS_CAUSAL: gl.constexpr):
    """Batch element, query head, key head and block of queries of a tile.

    Heads are taken in sections, whose keys and values stay in the L2; within a section all heads'
    longest blocks come first, so that no long one is left for the end.
    """
    q_heads, group, _, _, _, blocks, heads, section = work
    tiles_of_section = blocks * section
    first = number // tiles_of_section * section
    heads_here = gl.minimum(section, heads - first)
    number = number % tiles_of_section
    block = number // heads_here
    if IS_CAUSAL:
        block = blocks - 1 - block
    head = first + number % heads_here
    return head // q_heads, head % q_heads, head % q_heads // group, block


@gluon.jit
def key_blocks(
    first_query, kv_len, QUERIES: gl.constexpr, KEYS: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """How many blocks of keys a tile has, and how many of them need no mask.

    The last block is never among those, for simplicity.
    """
    end = kv_len
    unmasked = kv_len // KEYS
    if IS_CAUSAL:
        end = gl.minimum(kv_len, first_query + QUERIES)
        unmasked = gl.minimum(unmasked, (first_query + 1) // KEYS)
    blocks = (end + KEYS - 1) // KEYS
    return blocks, gl.minimum(unmasked, blocks - 1)


@gluon.jit
def _load(descriptors, buffers, barriers, work, IS_CAUSAL: gl.constexpr):
    """The loading warp."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = buffers
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    _, _, _, kv_len, tiles, _, _, _ = work
    QUERIES: gl.constexpr = ROWS * CONSUMERS
    count = 0  # key blocks so far, of all tiles
    turn = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, q_head, kv_head, block = tile_of(number, work, IS_CAUSAL)
        first = block * QUERIES
        blocks, _ = key_blocks(first, kv_len, QUERIES, KEYS, IS_CAUSAL)
        for who in gl.static_range(CONSUMERS):
            full = q_full.index(who)
            mbarrier.wait(q_empty.index(who), (turn & 1) ^ 1)
            mbarrier.expect(full, q_desc.block_type.nbytes)
            _tma_load(q_desc, [batch, q_head, first + who * ROWS, 0], full, q_tiles.index(who))
        for i in range(blocks):
            key = (blocks - 1 - i) * KEYS
            stage = count % STAGES
            phase = count // STAGES & 1
            full = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            _tma_load(k_desc, [batch, kv_head, key, 0], full, k_tiles.index(stage))
            full = v_full.index(stage)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(full, v_desc.block_type.nbytes)
            _tma_load(v_desc, [batch, kv_head, key, 0], full, v_tiles.index(stage))
            count += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def _mask(scores, first_query, first_key, kv_len, KEYS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
    seen = (key < kv_len)[None, :]
    if IS_CAUSAL:
        query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout))
        seen = seen & (key[None, :] <= query[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _start_scores(q, k_tile):
    """Start QKᵀ, (ROWS, KEYS)."""
    KEYS: gl.constexpr = k_tile.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    keys = k_tile.reshape((KEYS, HEAD_DIM)).permute((1, 0))
    nothing = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    return warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)


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
def _step(
    state,
    buffers,
    barriers,
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
    probabilities, output, largest, total = state
    q_tiles, k_tiles, v_tiles = buffers
    _, _, k_full, k_empty, v_full, v_empty, turn = barriers
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    mbarrier.wait(turn.index(WHO), count & 1)
    q = q_tiles.index(WHO).reshape((ROWS, HEAD_DIM))
    scores = _start_scores(q, k_tiles.index(stage))
    mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
    values = v_tiles.index(before).reshape((KEYS, HEAD_DIM))
    output = warpgroup_mma(probabilities, values, output, is_async=True)
    mbarrier.arrive(turn.index((WHO + 1) % CONSUMERS), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if IS_MASKED:
        scores = _mask(scores, first_query, first_key, kv_len, KEYS, IS_CAUSAL)
    scores, largest, factor = _softmax(scores, largest, scale, IS_MASKED)
    total = total * factor + gl.sum(scores, 1)
    # `probabilities` is read until here: their registers must not be reused before.
    output, scores, probabilities = warpgroup_mma_wait(0, deps=[output, scores, probabilities])
    mbarrier.arrive(v_empty.index(before), count=1)
    probabilities = gl.convert_layout(
        scores.to(probabilities.dtype), probabilities.type.layout, assert_trivial=True
    )
    output *= gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout))[:, None]
    return probabilities, output, largest, total


@gluon.jit
def _attend(
    buffers,
    outputs,
    barriers,
    work,
    scale,
    WHO: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A consumer: 64 queries of every tile."""
    q_tiles, k_tiles, v_tiles = buffers
    o_tiles, o_desc, lse = outputs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    q_heads, _, q_len, kv_len, tiles, _, _, _ = work
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    QUERIES: gl.constexpr = ROWS * CONSUMERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    count = 0
    phase = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, q_head, _, block = tile_of(number, work, IS_CAUSAL)
        blocks, unmasked = key_blocks(block * QUERIES, kv_len, QUERIES, KEYS, IS_CAUSAL)
        first = block * QUERIES + WHO * ROWS
        mbarrier.wait(q_full.index(WHO), phase & 1)
        q = q_tiles.index(WHO).reshape((ROWS, HEAD_DIM))

        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        mbarrier.wait(turn.index(WHO), count & 1)
        scores = _start_scores(q, k_tiles.index(stage))
        mbarrier.arrive(turn.index((WHO + 1) % CONSUMERS), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = _mask(scores, first, (blocks - 1) * KEYS, kv_len, KEYS, IS_CAUSAL)
        nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
        scores, largest, _ = _softmax(scores, nothing, scale, True)
        total = gl.sum(scores, 1)
        probabilities = gl.convert_layout(scores.to(q.dtype), OPERAND, assert_trivial=True)
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
        state = (probabilities, output, largest, total)
        count += 1
        for i in range(1, blocks - unmasked):
            key = (blocks - 1 - i) * KEYS
            state = _step(
                state, buffers, barriers, count, first, key, kv_len, scale, WHO, IS_CAUSAL, True
            )
            count += 1
        for _ in range(blocks - unmasked, blocks):
            state = _step(
                state, buffers, barriers, count, first, 0, kv_len, scale, WHO, IS_CAUSAL, False
            )
            count += 1
        mbarrier.arrive(q_empty.index(WHO), count=1)

        probabilities, output, largest, total = state
        stage = (count - 1) % STAGES
        mbarrier.wait(v_full.index(stage), (count - 1) // STAGES & 1)
        values = v_tiles.index(stage).reshape((KEYS, HEAD_DIM))
        output = warpgroup_mma(probabilities, values, output, is_async=True)
        output = warpgroup_mma_wait(0, deps=[output])
        mbarrier.arrive(v_empty.index(stage), count=1)
        output *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, LAYOUT))[:, None]
        o_tile = o_tiles.index(WHO)
        tma.store_wait(0)  # that of the tile before, which still reads this memory
        o_tile.reshape((ROWS, HEAD_DIM)).store(output.to(q.dtype))
        fence_async_shared()
        _tma_store(o_desc, [batch, q_head, first, 0], o_tile)
        if HAS_LSE:
            query = first + gl.arange(0, ROWS, total.type.layout)
            start = (batch * q_heads + q_head).to(gl.int64) * q_len
            gl.store(lse + start + query, (largest + gl.log2(total)) * LN_2, query < q_len)
        phase += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


# Triton compiles a kernel anew for integers that are 1 or multiples of 16 unless told not to: every
# new sequence length would cost a user seconds.
@gluon.jit(
    do_not_specialize=[
        "q_heads", "group", "q_len", "kv_len", "tiles", "blocks", "heads", "section"
    ]
)  # fmt: skip
def _prefill(
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
    heads,
    section,
    scale,
    CONSUMERS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    query_shape: gl.constexpr = [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    key_shape: gl.constexpr = [STAGES, 1, 1, KEYS, HEAD_DIM]
    buffers = (
        gl.allocate_shared_memory(dtype, query_shape, q_desc.layout),
        gl.allocate_shared_memory(dtype, key_shape, k_desc.layout),
        gl.allocate_shared_memory(dtype, key_shape, v_desc.layout),
    )
    o_tiles = gl.allocate_shared_memory(dtype, query_shape, o_desc.layout)
    turn = _barriers(CONSUMERS, 1)
    barriers = (
        _barriers(CONSUMERS, 1),
        _barriers(CONSUMERS, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
        turn,
    )
    mbarrier.arrive(turn.index(0), count=1)
    work = (q_heads, group, q_len, kv_len, tiles, blocks, heads, section)
    descriptors = (q_desc, k_desc, v_desc)
    outputs = (o_tiles, o_desc, lse)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (buffers, outputs, barriers, work, scale, 0, IS_CAUSAL, HAS_LSE)),
                (_attend, (buffers, outputs, barriers, work, scale, 1, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, buffers, barriers, work, IS_CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (buffers, outputs, barriers, work, scale, 0, IS_CAUSAL, HAS_LSE)),
                (_attend, (buffers, outputs, barriers, work, scale, 1, IS_CAUSAL, HAS_LSE)),
                (_attend, (buffers, outputs, barriers, work, scale, 2, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, buffers, barriers, work, IS_CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


class Schedule(NamedTuple):
    """How a call is cut up; measured on an H200 (benchmarks/NOTES.md)."""

    consumers: int
    """Warp groups that compute, 2 or 3."""
    keys: int
    """Keys of a block."""
    stages: int
    """Blocks of keys, and of values, that fit in shared memory."""
    registers: int
    """Registers per thread of a consumer."""


def schedule(head_dim: int, is_causal: bool) -> Schedule:
    if head_dim > 64:
        return Schedule(consumers=2, keys=128, stages=2, registers=240)
    if is_causal:
        return Schedule(consumers=2, keys=128, stages=4, registers=240)
    return Schedule(consumers=3, keys=128, stages=3, registers=160)


SECTION_BYTES = {False: 24 * 2**20, True: 64 * 2**20}
"""Bytes of the keys and values that are worked on at a time, plain and causal: they should stay in
the L2, but a causal call also needs many heads at a time to balance long blocks with short ones."""

LARGEST_HEAD_DIM = 128


@overload
def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention on a Hopper GPU.

    Tensors are read where they lie if TMA can: adjacent elements of a head, every other stride and
    the address a multiple of 16 bytes. Others are copied first.

    Args:
        query: (B, Hq, Sq, D) float16 or bfloat16; D at most 128 and a multiple of 8.
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        value: (B, Hkv, Sk, D).
        is_causal: query i sees keys 0 … i (top left, as SDPA has it).
        scale: of the scores, not negative; None is 1/√D.
        return_lse: also return the natural logarithm of each row's sum of exponentials.

    Returns:
        The output, (B, Hq, Sq, D), laid out as `query` where that is dense; with `return_lse` also
        the (B, Hq, Sq) float32 logarithms.

    Raises:
        ValueError: D is too large or no multiple of 8, or the scale is negative.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim > LARGEST_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: needs a multiple of 8, at most {LARGEST_HEAD_DIM}")
    if scale < 0:
        raise ValueError(f"scale {scale}: must not be negative")
    plan = schedule(head_dim, is_causal)
    tile_dim = 64 if head_dim <= 64 else 128
    output = torch.empty_like(query)
    if not _loadable(output):
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(
        (batch, q_heads, q_len) if return_lse else 0, dtype=torch.float32, device=query.device
    )
    q_desc, o_desc = (_descriptor(each, ROWS.value, tile_dim) for each in (query, output))
    k_desc, v_desc = (_descriptor(each, plan.keys, tile_dim) for each in (key, value))
    blocks = -(-q_len // (ROWS.value * plan.consumers))
    tiles = blocks * batch * q_heads
    group = q_heads // kv_heads
    head_bytes = 2 * kv_len * head_dim * key.element_size()
    section = max(1, SECTION_BYTES[is_causal] // head_bytes) * group
    _prefill[(min(tiles, _multiprocessors(query.device)),)](
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
        batch * q_heads,
        min(section, batch * q_heads),
        scale * math.log2(math.e),
        CONSUMERS=plan.consumers,
        KEYS=plan.keys,
        STAGES=plan.stages,
        REGISTERS=plan.registers,
        IS_CAUSAL=is_causal,
        HAS_LSE=return_lse,
        num_warps=4,
    )
    return (output, lse) if return_lse else output


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _loadable(tensor: Tensor) -> bool:
    """Whether TMA can address it."""
    size = tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride * size % 16 == 0 for stride in tensor.stride()[:-1])
    )


@functools.lru_cache
def _layout(rows: int, tile_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, tile_dim], element)


def _descriptor(tensor: Tensor, rows: int, tile_dim: int) -> TensorDescriptor:
    """What TMA loads and stores tiles of; elements outside are read as 0 and not written."""
    tensor = tensor if _loadable(tensor) else tensor.contiguous()
    return TensorDescriptor(
        tensor,
        list(tensor.shape),
        list(tensor.stride()),
        [1, 1, rows, tile_dim],
        _layout(rows, tile_dim, tensor.dtype),
    )
