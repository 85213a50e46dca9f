"""Scores of a Hopper consumer: 64 queries by a block of keys, spread over its 128 threads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

ROWS = gl.constexpr(64)
"""Queries of a consumer: what one warp group's matrix instruction (`wgmma`) takes."""


@gluon.jit
def matrix(block):
    """(rows, D) of a block of four dimensions, as descriptors have them."""
    return block.reshape((block.shape[2], block.shape[3]))


@gluon.jit
def start_scores(query, keys):
    """Start QKᵀ, (ROWS, N): int32 of INT8, else float32. To be waited for before it is read.

    Args:
        query: (ROWS, D) in shared memory.
        keys: (N, D) in shared memory.
    """
    N: gl.constexpr = keys.shape[0]
    # An instruction takes 32 bytes of each row.
    K: gl.constexpr = 256 // keys.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, K])
    DTYPE: gl.constexpr = gl.int32 if keys.dtype == gl.int8 else gl.float32
    nothing = gl.zeros([ROWS, N], DTYPE, LAYOUT)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_scores(scores, query, keys):
    """Start QKᵀ of another piece of the head_dim, added to `scores`."""
    return warpgroup_mma(query, keys.permute((1, 0)), scores, is_async=True)


@gluon.jit
def own_sums(weights):
    """Sums of weights (ROWS, N), in the layout of scores, over what each thread holds: (ROWS, 4).

    Four threads share a row. That they add up their sums can wait until the last block.
    """
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape((ROWS, N // 8, 4, 2)), 3), 1)


@gluon.jit
def add_sink(sink, maximum, total, LOG2_UNIT: gl.constexpr):
    """The factor for what was summed before, the new maximum and the new sum, as in
    `online_softmax.add_sink`; a weight of 1 has been counted as 2^LOG2_UNIT."""
    new_maximum = gl.maximum(maximum, sink)
    origin = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = gl.exp2(maximum - origin)
    return rescale, new_maximum, total * rescale + gl.exp2(sink - origin + LOG2_UNIT)
