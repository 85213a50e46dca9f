"""Prefill for Hopper GPUs (compute capability 9.0), in Gluon, Triton's lower-level language.

FlashAttention 3's schedule (Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with
Asynchrony and Low-precision"):

- One warp loads tiles of query, key and value with the tensor memory accelerator (TMA), and the
  warp groups that compute ("consumers") wait for them at barriers in shared memory.
- A consumer has 64 queries. It starts QKᵀ of the next block of keys and PV of this one together,
  and computes the next one's softmax while PV is still running.
- Consumers take turns at starting their products, so that one's softmax runs beside another's.
- The grid is persistent (`persistent.py`): the loads of a program's next tile begin while this one
  is finished.
- Consumers may have different heads of one group, which share the keys, instead of different
  queries of one head: a causal tile of fewer queries has fewer keys that some of them must not see.

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

from replay.kernels.triton.descriptors import at
from replay.kernels.triton.launch import Launch
from replay.kernels.triton.persistent import (
    SHORT,
    key_blocks,
    multiprocessors,
    place_of,
    section_of,
    tile_number,
    turns_of,
)

ROWS = gl.constexpr(64)
"""Queries of a consumer: what one warp group's matrix instruction takes."""
LN_2 = gl.constexpr(math.log(2))
LOADER_REGISTERS = gl.constexpr(24)

# Renamed between the Triton versions that we support.
_new_names = hasattr(tma, "async_store")
_tma_load = tma.async_load if _new_names else tma.async_copy_global_to_shared
_tma_store = tma.async_store if _new_names else tma.async_copy_shared_to_global


@gluon.jit
def _tile(turn, work, HEADS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Batch element, first query head, key head and block of queries of a program's tile."""
    q_heads, group, _, _, _, blocks, bundles, section = work
    number = tile_number(turn, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)
    bundle, block = place_of(number, blocks, bundles, section, IS_CAUSAL)
    head = bundle * HEADS
    return head // q_heads, head % q_heads, head % q_heads // group, block


@gluon.jit
def _load(descriptors, buffers, barriers, work, HEADS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The loading warp."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = buffers
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    _, _, _, kv_len, tiles, _, _, _ = work
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    count = 0  # key blocks so far, of all tiles
    for turn in range(turns_of(tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        batch, q_head, kv_head, block = _tile(turn, work, HEADS, IS_CAUSAL)
        first = block * QUERIES
        blocks, _ = key_blocks(first, kv_len, QUERIES, KEYS, IS_CAUSAL)
        for who in gl.static_range(CONSUMERS):
            full = q_full.index(who)
            mbarrier.wait(q_empty.index(who), (turn & 1) ^ 1)
            mbarrier.expect(full, q_desc.block_type.nbytes)
            own = [batch, q_head + who % HEADS, first + who // HEADS * ROWS, 0]
            _tma_load(q_desc, own, full, q_tiles.index(who))
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
    packed, output, largest, total = state
    q_tiles, k_tiles, v_tiles = buffers
    _, _, k_full, k_empty, v_full, v_empty, turn_of = barriers
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    stage = count % STAGES
    before = (count - 1) % STAGES
    probabilities = _unpack(packed, output, v_tiles.dtype)
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    mbarrier.wait(turn_of.index(WHO), count & 1)
    q = q_tiles.index(WHO).reshape((ROWS, HEAD_DIM))
    scores = _start_scores(q, k_tiles.index(stage))
    mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
    values = v_tiles.index(before).reshape((KEYS, HEAD_DIM))
    output = warpgroup_mma(probabilities, values, output, is_async=True)
    mbarrier.arrive(turn_of.index((WHO + 1) % CONSUMERS), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if IS_MASKED:
        scores = _mask(scores, first_query, first_key, kv_len, KEYS, IS_CAUSAL)
    scores, largest, factor = _softmax(scores, largest, scale, IS_MASKED)
    total = total * factor + gl.sum(scores, 1)
    # `probabilities` is read until here: their registers must not be reused before.
    output, scores, packed = warpgroup_mma_wait(0, deps=[output, scores, packed])
    mbarrier.arrive(v_empty.index(before), count=1)
    output *= gl.convert_layout(factor, gl.SliceLayout(1, output.type.layout))[:, None]
    return _pack(scores, v_tiles.dtype), output, largest, total


@gluon.jit
def _attend(
    arguments,
    WHO: gl.constexpr,
    HEADS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """A consumer: 64 queries of every tile."""
    buffers, outputs, barriers, work, scale = arguments
    q_tiles, k_tiles, v_tiles = buffers
    o_tiles, o_desc, lse = outputs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn_of = barriers
    q_heads, _, q_len, kv_len, tiles, _, _, _ = work
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    QUERIES: gl.constexpr = ROWS * CONSUMERS // HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    count = 0
    for turn in range(turns_of(tiles, gl.program_id(0), gl.num_programs(0), IS_CAUSAL)):
        batch, q_head, _, block = _tile(turn, work, HEADS, IS_CAUSAL)
        blocks, unmasked = key_blocks(block * QUERIES, kv_len, QUERIES, KEYS, IS_CAUSAL)
        q_head += WHO % HEADS
        first = block * QUERIES + WHO // HEADS * ROWS
        mbarrier.wait(q_full.index(WHO), turn & 1)
        q = q_tiles.index(WHO).reshape((ROWS, HEAD_DIM))

        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        mbarrier.wait(turn_of.index(WHO), count & 1)
        scores = _start_scores(q, k_tiles.index(stage))
        mbarrier.arrive(turn_of.index((WHO + 1) % CONSUMERS), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = _mask(scores, first, (blocks - 1) * KEYS, kv_len, KEYS, IS_CAUSAL)
        nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores.type.layout))
        scores, largest, _ = _softmax(scores, nothing, scale, True)
        total = gl.sum(scores, 1)
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
        state = (_pack(scores, q.dtype), output, largest, total)
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

        packed, output, largest, total = state
        probabilities = _unpack(packed, output, q.dtype)
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
        "q_heads", "group", "q_len", "kv_len", "tiles", "blocks", "bundles", "section"
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
    turn_of = _barriers(CONSUMERS, 1)
    barriers = (
        _barriers(CONSUMERS, 1),
        _barriers(CONSUMERS, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
        _barriers(STAGES, 1),
        _barriers(STAGES, CONSUMERS),
        turn_of,
    )
    mbarrier.arrive(turn_of.index(0), count=1)
    work = (q_heads, group, q_len, kv_len, tiles, blocks, bundles, section)
    descriptors = (q_desc, k_desc, v_desc)
    outputs = (o_tiles, o_desc, lse)
    attend = (buffers, outputs, barriers, work, scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (attend, 0, HEADS, IS_CAUSAL, HAS_LSE)),
                (_attend, (attend, 1, HEADS, IS_CAUSAL, HAS_LSE)),
                (_load, (descriptors, buffers, barriers, work, HEADS, IS_CAUSAL)),
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
                (_load, (descriptors, buffers, barriers, work, HEADS, IS_CAUSAL)),
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
                (_load, (descriptors, buffers, barriers, work, HEADS, IS_CAUSAL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


class Schedule(NamedTuple):
    """How a call is cut up; measured on an H200 (docs/notes.md)."""

    consumers: int
    """Warp groups that compute, 2 to 4."""
    heads: int
    """Query heads of one group that a tile has side by side; divides the consumers."""
    keys: int
    """Keys of a block."""
    stages: int
    """Blocks of keys, and of values, that fit in shared memory."""
    registers: int
    """Registers per thread of a consumer."""


def schedule(head_dim: int, group: int, kv_len: int) -> Schedule:
    """For `group` query heads a key head."""
    if head_dim > 64:
        return Schedule(consumers=2, heads=1, keys=128, stages=2, registers=240)
    if kv_len <= SHORT:
        return Schedule(consumers=4, heads=math.gcd(group, 4), keys=64, stages=6, registers=112)
    return Schedule(consumers=3, heads=1, keys=128, stages=3, registers=160)


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
    head_dim = query.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim > LARGEST_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim {head_dim}: needs a multiple of 8, at most {LARGEST_HEAD_DIM}")
    if scale < 0:
        raise ValueError(f"scale {scale}: must not be negative")
    query, key, value = (
        each if _is_loadable(each) else each.contiguous() for each in (query, key, value)
    )
    output = torch.empty_like(query)
    if not _is_loadable(output):
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tensors = (query, key, value, output)
    launch, descriptors = _planned(
        tuple(each.shape for each in tensors),
        tuple(each.stride() for each in tensors),
        query.dtype,
        query.device,
        is_causal,
        scale,
        return_lse,
    )
    lse = output  # nothing is written there
    if return_lse:
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    launch(*map(at, descriptors, tensors), lse)
    return (output, lse) if return_lse else output


Sizes = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[Sizes, ...],
    strides: tuple[Sizes, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    scale: float,
    return_lse: bool,
) -> tuple[Launch, list[TensorDescriptor]]:
    """The launch for calls of one shape, and descriptors of query, key, value and output."""
    batch, q_heads, q_len, head_dim = shapes[0]
    kv_heads, kv_len = shapes[1][1:3]
    group = q_heads // kv_heads
    plan = schedule(head_dim, group, kv_len)
    rows = (ROWS.value, plan.keys, plan.keys, ROWS.value)
    tile_dim = 64 if head_dim <= 64 else 128
    descriptors = [
        _descriptor(shape, stride, dtype, length, tile_dim)
        for shape, stride, length in zip(shapes, strides, rows, strict=True)
    ]
    blocks = -(-q_len // (ROWS.value * plan.consumers // plan.heads))
    bundles = batch * q_heads // plan.heads
    tiles = blocks * bundles
    head_bytes = 2 * kv_len * head_dim * dtype.itemsize
    launch = Launch(
        _prefill,
        (min(tiles, multiprocessors(device)), 1, 1),
        device,
        {
            "q_heads": q_heads,
            "group": group,
            "q_len": q_len,
            "kv_len": kv_len,
            "tiles": tiles,
            "blocks": blocks,
            "bundles": bundles,
            "section": section_of(head_bytes, bundles, group // plan.heads, is_causal),
            "scale": scale * math.log2(math.e),
            "CONSUMERS": plan.consumers,
            "HEADS": plan.heads,
            "KEYS": plan.keys,
            "STAGES": plan.stages,
            "REGISTERS": plan.registers,
            "IS_CAUSAL": is_causal,
            "HAS_LSE": return_lse,
        },
        num_warps=4,
    )
    return launch, descriptors


def _is_loadable(tensor: Tensor) -> bool:
    """Whether TMA can address it."""
    return tensor.data_ptr() % 16 == 0 and _are_loadable(tensor.stride(), tensor.dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def _are_loadable(strides: Sizes, size: int) -> bool:
    *others, last = strides
    return last == 1 and all(stride > 0 and stride * size % 16 == 0 for stride in others)


@functools.lru_cache
def _layout(rows: int, tile_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, tile_dim], element)


def _descriptor(
    shape: Sizes, strides: Sizes, dtype: torch.dtype, rows: int, tile_dim: int
) -> TensorDescriptor:
    """What TMA loads and stores tiles of; elements outside are read as 0 and not written.

    It is of a tensor without memory, for `at`.
    """
    return TensorDescriptor(
        torch.empty_strided(shape, strides, dtype=dtype, device="meta"),
        list(shape),
        list(strides),
        [1, 1, rows, tile_dim],
        _layout(rows, tile_dim, dtype),
    )
