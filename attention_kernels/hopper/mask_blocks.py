"""Blocks of a mask in a Hopper kernel, which TMA loads for each consumer along with the keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attention_kernels.hopper.pipeline import fill, release, wait_for
from attention_kernels.hopper.scores import ROWS, matrix


@gluon.jit
def fill_mask(
    ring, mask_desc, place, mask_head, count, CONSUMERS: gl.constexpr, HEADS: gl.constexpr
):
    """Load every consumer's part of the mask's block number `count`; `place` is the place of the
    first consumer's part."""
    batch, head, row, key = place
    if mask_desc.dtype == gl.uint16:  # two bytes of a bool mask
        key = key // 2
    STAGES: gl.constexpr = ring.buffers.shape[0] // CONSUMERS
    for who in gl.static_range(CONSUMERS):
        own = [batch, (head + who % HEADS) * mask_head, row + who // HEADS * ROWS, key]
        fill(ring, mask_desc, own, who * STAGES + count % STAGES, count // STAGES)


@gluon.jit
def mask_of(ring, count, CONSUMERS: gl.constexpr, WHO: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a consumer's part of the mask's block number `count`, and release its buffer."""
    STAGES: gl.constexpr = ring.buffers.shape[0] // CONSUMERS
    index = WHO * STAGES + count % STAGES
    wait_for(ring, index, count // STAGES)
    mask = matrix(ring.buffers.index(index)).load(LAYOUT)
    # When later instructions are issued, loads may still be waiting for shared memory, which
    # another consumer's products keep busy. Only a fence keeps TMA from overwriting the buffer too
    # early.
    fence_async_shared()
    release(ring, index)
    return mask


@gluon.jit
def hide(scores, ring, count, CONSUMERS: gl.constexpr, WHO: gl.constexpr):
    """Replace scores by -inf where a bool mask is False.

    A thread's scores are pairs of neighbours, so a thread loads the two bytes of a pair at once.
    """
    left, right = gl.split(scores.reshape((scores.shape[0], scores.shape[1] // 2, 2)))
    PAIRS: gl.constexpr = left.type.layout
    mask = mask_of(ring, count, CONSUMERS, WHO, PAIRS)
    left = gl.where((mask & 0xFF) != 0, left, float("-inf"))
    right = gl.where((mask & 0xFF00) != 0, right, float("-inf"))
    hidden = gl.join(left, right).reshape((scores.shape[0], scores.shape[1]))
    LAYOUT: gl.constexpr = scores.type.layout
    return gl.convert_layout(hidden, LAYOUT, assert_trivial=True)
