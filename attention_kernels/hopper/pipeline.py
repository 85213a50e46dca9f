"""Cooperation of the warps of a Hopper program, in Gluon: one warp loads, warp groups compute.

The loading warp (the producer) copies blocks into shared memory with the tensor memory accelerator
(TMA), and the warp groups (the consumers) read their operands from there. Blocks are stored in
rings of a few buffers, so that loads and products overlap. Each buffer has two barriers:

- `full`: the producer announces a number of bytes, and waiting consumers continue when TMA has
  written these bytes.
- `empty`: each consumer arrives when its products have read the buffer. When all have arrived, the
  producer fills the buffer again.

A barrier in shared memory has phases. A waiting warp waits for the end of a phase, which it
specifies by the lowest bit of the phase's number. Block number `count`, counted from the program's
start, is in buffer `count % STAGES`, in phase `count // STAGES` of that buffer. The phase before
the first counts as ended, because all buffers are free at the start.

Only TMA needs a barrier in shared memory. Before an arrival at such a barrier, Gluon makes all
warps of a group wait for each other. At one of the 16 named barriers (PTX `bar`), each warp arrives
independently, in one instruction. Turns use named barriers, and so do `empty` barriers if there are
enough named ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# The names differ between the supported versions of Triton.
_new_names = hasattr(tma, "async_store")
tma_load = tma.async_load if _new_names else tma.async_copy_global_to_shared
tma_store = tma.async_store if _new_names else tma.async_copy_shared_to_global
_all_warps_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

WARP_GROUP = gl.constexpr(128)
"""Number of threads in a warp group."""
LOADER_REGISTERS = gl.constexpr(24)
"""Registers per thread of the loading warp: the minimum, so that consumers have more."""

FIRST_NUMBER = gl.constexpr(6)
"""First named barrier of these kernels. Triton may use the lower numbers: 0, 1, and one for every
partition."""
CONSUMERS_NAMED = gl.constexpr(2)
"""Number of consumers for which shared rings have named barriers. More consumers may need more than
16 barriers, and three consumers, with 160 registers each, were slower with named barriers."""
KEY, VALUE = gl.constexpr(0), gl.constexpr(1)
"""The rings that consumers share."""


class Ring(NamedTuple):
    """Buffers for blocks in shared memory, and the two barriers of each buffer."""

    buffers: Any
    full: Any
    empty: Any
    """Barriers in shared memory; unused if named barriers take their place."""


@gluon.jit
def make_ring(buffers):
    """Return a ring of buffers (STAGES, …); one consumer reads each buffer."""
    STAGES: gl.constexpr = buffers.shape[0]
    return Ring(buffers, make_barriers(STAGES, 1), make_barriers(STAGES, 1))


@gluon.jit
def make_shared_ring(buffers, CONSUMERS: gl.constexpr):
    """Return a ring of buffers (STAGES, …); all consumers read each buffer."""
    STAGES: gl.constexpr = buffers.shape[0]
    gl.static_assert(
        CONSUMERS != CONSUMERS_NAMED or FIRST_NUMBER + CONSUMERS + 2 * STAGES <= 16,
        "a GPU has 16 named barriers",
    )
    empty = () if CONSUMERS == CONSUMERS_NAMED else make_barriers(STAGES, CONSUMERS)
    return Ring(buffers, make_barriers(STAGES, 1), empty)


@gluon.jit
def buffer_of(count, STAGES: gl.constexpr):
    """Return the index and the phase of the buffer for block number `count`, at least 0."""
    count = gl.to_tensor(count).to(gl.uint32)
    return (count % STAGES).to(gl.int32), (count // STAGES).to(gl.int32)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers whose phases end with ARRIVALS arrivals each.

    The barriers must be used until the program ends. Otherwise the compiler reuses their memory,
    which is undefined in PTX before `mbarrier.inval`.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def fill(ring, desc, place, index, phase, rest=None):
    """Load, as the producer, the block at `place` of a descriptor's tensor once the buffer is free.

    `rest` has the descriptor and the buffers for a second piece of the head dimension, which is
    loaded with the first.
    """
    mbarrier.wait(ring.empty.index(index), (phase & 1) ^ 1)
    _copy(ring, desc, place, index, rest)


@gluon.jit
def fill_shared(
    ring, desc, place, index, phase, WHICH: gl.constexpr, CONSUMERS: gl.constexpr, rest=None
):
    """Call `fill` for the ring of KEY or VALUE."""
    if CONSUMERS == CONSUMERS_NAMED:
        if phase > 0:
            named_barrier("bar.sync", _number(ring, index, WHICH, CONSUMERS), _everyone(CONSUMERS))
        _copy(ring, desc, place, index, rest)
    else:
        fill(ring, desc, place, index, phase, rest)


@gluon.jit
def fill_from_pages(
    ring, desc, table, kv_head, key, last, index, phase, WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Load the block of keys from number `key` on from the pages of a sequence.

    A box of the descriptor holds rows of one page and 128 bytes of each row. In shared memory, such
    columns of all rows of a block are adjacent, so a box is a contiguous part of the block.

    Args:
        table: pointer to the numbers of the sequence's pages.
        last: last key of the sequence. Boxes after it are replaced by the box that holds it.
    """
    if CONSUMERS == CONSUMERS_NAMED:
        if phase > 0:
            named_barrier("bar.sync", _number(ring, index, WHICH, CONSUMERS), _everyone(CONSUMERS))
    else:
        mbarrier.wait(ring.empty.index(index), (phase & 1) ^ 1)
    full, block = ring.full.index(index), ring.buffers.index(index)
    BOX: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = block.shape[2] // BOX
    PIECES: gl.constexpr = block.shape[3] // COLUMNS
    mbarrier.expect(full, BOXES * PIECES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        first = gl.minimum(key + i * BOX, last)
        page = gl.load(table + first // PAGE_SIZE)
        row = first % PAGE_SIZE // BOX * BOX
        rows = block.slice(i * BOX, BOX, dim=2)
        for j in gl.static_range(PIECES):
            part = rows.slice(j * COLUMNS, COLUMNS, dim=3)
            tma_load(desc, [page, kv_head, row, j * COLUMNS], full, part)


@gluon.jit
def _copy(ring, desc, place, index, rest):
    full = ring.full.index(index)
    if rest is None:
        mbarrier.expect(full, desc.block_type.nbytes)
    else:
        rest_desc, buffers = rest
        mbarrier.expect(full, desc.block_type.nbytes + rest_desc.block_type.nbytes)
        FIRST: gl.constexpr = desc.block_type.shape[3]
        tma_load(rest_desc, [place[0], place[1], place[2], FIRST], full, buffers.index(index))
    tma_load(desc, place, full, ring.buffers.index(index))


@gluon.jit
def wait_for(ring, index, phase):
    """Wait, as a consumer, until the buffer is full."""
    mbarrier.wait(ring.full.index(index), phase & 1)


@gluon.jit
def release(ring, index):
    """Release a buffer that this consumer has read. Products must have been waited for, and loads
    must be followed by a `fence_async_shared`."""
    mbarrier.arrive(ring.empty.index(index), count=1)


@gluon.jit
def release_shared(ring, index, WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Call `release` for the ring of KEY or VALUE."""
    if CONSUMERS == CONSUMERS_NAMED:
        named_barrier("bar.arrive", _number(ring, index, WHICH, CONSUMERS), _everyone(CONSUMERS))
    else:
        release(ring, index)


@gluon.jit
def meet():
    """Make the warps of a consumer wait for each other. Meeting costs little after all warps have
    waited for one product.

    Triton inserts such a meeting before a wait for a buffer, unless the warps have met since the
    previous wait. Without an earlier call of `meet`, that meeting would come at the end of a
    softmax, when some warps are late, and would delay the request for the buffer.
    """
    _all_warps_meet()


@gluon.jit
def clear(buffer, count):
    """Set a buffer's rows (N, D) to zeros from row `count` on. Every consumer calls this, so that
    no consumer waits for another."""
    DV: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    STEP: gl.constexpr = 16
    for i in gl.static_range(buffer.shape[0] // STEP):
        part = buffer.slice(i * STEP, STEP, dim=0)
        rows = i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where((rows < count)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def wait_for_turn(WHO: gl.constexpr):
    """Wait for the turn of consumer number WHO."""
    named_barrier("bar.sync", gl.to_tensor(FIRST_NUMBER + WHO), gl.to_tensor(2 * WARP_GROUP))


@gluon.jit
def wait_for_turn_after(sums, WHO: gl.constexpr):
    """Call `wait_for_turn` after `sums`, two float32 numbers per thread, are computed."""
    _wait_after(sums, WHO, 2 * WARP_GROUP)


@gluon.jit
def meet_after(sums, WHO: gl.constexpr):
    """Make the warps of consumer number WHO, which takes no turns, meet after `sums` are
    computed."""
    _wait_after(sums, WHO, WARP_GROUP)


@gluon.jit
def _wait_after(sums, WHO: gl.constexpr, THREADS: gl.constexpr):
    """Wait for THREADS threads at the named barrier of consumer number WHO after `sums` are
    computed.

    If results are needed only after a wait, the compiler (`ptxas`) moves their arithmetic past the
    wait, which delays other threads. Barriers do not prevent this. The barrier's number therefore
    depends on the sums: a negative sum, which the compiler cannot rule out, would select the next
    barrier.
    """
    gl.inline_asm_elementwise(
        """{
            .reg .f32 sum;
            .reg .pred negative;
            .reg .b32 number;
            add.f32 sum, $2, $3;
            setp.lt.f32 negative, sum, 0f00000000;
            selp.b32 number, 1, 0, negative;
            add.u32 number, number, $4;
            bar.sync number, $6;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
        }""",
        "=r,=r,f,f,r,r,r,r",
        [sums, gl.to_tensor(FIRST_NUMBER + WHO), gl.to_tensor(THREADS)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def pass_turn(WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    """Give the turn to the next consumer."""
    named_barrier(
        "bar.arrive",
        gl.to_tensor(FIRST_NUMBER + (WHO + 1) % CONSUMERS),
        gl.to_tensor(2 * WARP_GROUP),
    )


@gluon.jit
def _number(ring, index, WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the number of a buffer's named barrier. The numbers for turns come first."""
    return FIRST_NUMBER + CONSUMERS + WHICH * ring.buffers.shape[0] + index


@gluon.jit
def _everyone(CONSUMERS: gl.constexpr):
    """Return the number of threads that meet when a buffer is released: the threads of all
    consumers and of the loading warp."""
    return gl.to_tensor(CONSUMERS * WARP_GROUP + 32)


@gluon.jit
def named_barrier(OPERATION: gl.constexpr, number, threads):
    """Arrive at a named barrier for `threads` threads: `bar.sync` waits, `bar.arrive` does not."""
    PTX: gl.constexpr = OPERATION + " $1, $2; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(
        PTX, "=r,r,r", [number, threads], dtype=gl.int32, is_pure=False, pack=1
    )
