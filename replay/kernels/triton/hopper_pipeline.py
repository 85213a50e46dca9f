"""How the warps of a Hopper program work together, in Gluon: one loads, groups of four compute.

The loading warp (the producer) copies blocks into shared memory with the tensor memory accelerator
(TMA), and the warp groups (the consumers) multiply from there. Blocks lie in rings of a few
buffers, so that neither side waits for the other as long as there is something to do. Each buffer
has two barriers:

- `full`: the producer says how many bytes will come, and consumers that wait go on when TMA has
  written them;
- `empty`: each consumer arrives when its products have read the buffer, and when all have, the
  producer fills it again.

A barrier has phases, and who waits says for the end of which one, by its lowest bit. Block number
`count`, counted from the program's start, is in buffer `count % STAGES`, in that buffer's phase
`count // STAGES`. The phase before the first counts as ended: all buffers begin free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed between the Triton versions that we support.
_new_names = hasattr(tma, "async_store")
tma_load = tma.async_load if _new_names else tma.async_copy_global_to_shared
tma_store = tma.async_store if _new_names else tma.async_copy_shared_to_global

LOADER_REGISTERS = gl.constexpr(24)
"""Registers per thread of the loading warp: the fewest there are, so that consumers have more."""


class Ring(NamedTuple):
    """Buffers for blocks in shared memory, and the two barriers of each."""

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def make_ring(buffers, READERS: gl.constexpr):
    """The ring of some buffers (STAGES, …), each of which READERS consumers read."""
    STAGES: gl.constexpr = buffers.shape[0]
    return Ring(buffers, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers whose phases end with ARRIVALS arrivals each.

    To be used until the program ends: the compiler gives the memory of barriers that nobody waits
    for to other values, which PTX does not define before `mbarrier.inval`.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def fill(ring, desc, place, index, phase):
    """The producer loads what is at `place` of a descriptor's tensor, once the buffer is free."""
    mbarrier.wait(ring.empty.index(index), (phase & 1) ^ 1)
    mbarrier.expect(ring.full.index(index), desc.block_type.nbytes)
    tma_load(desc, place, ring.full.index(index), ring.buffers.index(index))


@gluon.jit
def wait_for(ring, index, phase):
    """A consumer waits until the buffer is full."""
    mbarrier.wait(ring.full.index(index), phase & 1)


@gluon.jit
def release(ring, index):
    """A consumer has read the buffer."""
    mbarrier.arrive(ring.empty.index(index), count=1)


@gluon.jit
def wait_for_turn(turns, count, WHO: gl.constexpr):
    """Consumer number WHO waits for its turn number `count`."""
    mbarrier.wait(turns.index(WHO), count & 1)


@gluon.jit
def pass_turn(turns, WHO: gl.constexpr):
    """It is the next consumer's turn."""
    CONSUMERS: gl.constexpr = turns.shape[0]
    mbarrier.arrive(turns.index((WHO + 1) % CONSUMERS), count=1)
