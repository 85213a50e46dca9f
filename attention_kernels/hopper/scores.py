"""Scores of a Hopper consumer: 64 queries by a block of keys, spread over its 128 threads."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

ROWS = gl.constexpr(64)
"""Number of queries of a consumer: the rows of one matrix instruction of a warp group (`wgmma`)."""


@gluon.jit
def matrix(block):
    """Reshape a four-dimensional block, as loaded through a descriptor, to (rows, D)."""
    return block.reshape((block.shape[2], block.shape[3]))


@gluon.jit
def start_scores(query, keys):
    """Start QKᵀ and return its result (ROWS, N), int32 for INT8 operands, else float32. Callers
    must wait for the product before they read the result.

    Args:
        query: (ROWS, D) in shared memory.
        keys: (N, D) in shared memory.
    """
    N: gl.constexpr = keys.shape[0]
    # An instruction multiplies 32 bytes of each row.
    K: gl.constexpr = 256 // keys.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, K])
    DTYPE: gl.constexpr = gl.int32 if keys.dtype == gl.int8 else gl.float32
    nothing = gl.zeros([ROWS, N], DTYPE, LAYOUT)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_scores(scores, query, keys):
    """Start QKᵀ of another piece of the head dimension, added to `scores`."""
    return warpgroup_mma(query, keys.permute((1, 0)), scores, is_async=True)


@gluon.jit
def of_rows(each, like):
    """Convert (ROWS,) to (ROWS, 1) in the layout of a product `like`."""
    return gl.convert_layout(each, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def own_sums(weights):
    """Return each thread's sums of its own weights, (ROWS, 4), from weights (ROWS, N).

    Four threads share a row. Their sums are added up only after the last block.
    """
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape((ROWS, N // 8, 4, 2)), 3), 1)


@gluon.jit
def own(each, OWN: gl.constexpr):
    """Convert (ROWS,), which all four threads of a row hold, to (ROWS, 4) in the layout OWN of
    `own_sums`."""
    each = gl.convert_layout(each, gl.SliceLayout(1, OWN), assert_trivial=True)[:, None]
    each, _ = gl.broadcast(each, gl.zeros([ROWS, 4], gl.float32, OWN))
    return each


@gluon.jit
def for_all_of_own(each, like):
    """Broadcast each thread's own number, (ROWS, 4), to the thread's elements of each row of a
    product `like` (ROWS, N)."""
    LAYOUT: gl.constexpr = like.type.layout
    PARTS: gl.constexpr = like.reshape((ROWS, like.shape[1] // 8, 4, 2)).type.layout
    THREADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, PARTS))
    each = gl.convert_layout(each, THREADS, assert_trivial=True)[:, None, :, None]
    each, _ = gl.broadcast(each, gl.zeros([ROWS, like.shape[1] // 8, 4, 2], gl.float32, PARTS))
    return gl.convert_layout(each.reshape(like.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def first_of_own(each, OWN: gl.constexpr):
    """Return each thread's first element of each row of a product (ROWS, N), as (ROWS, 4) in the
    layout OWN of `own_sums`."""
    parts = each.reshape((ROWS, each.shape[1] // 8, 4, 2)).permute((0, 2, 1, 3))
    parts = parts.reshape((ROWS, 4, each.shape[1] // 4))
    for _ in gl.static_range(_log2(parts.shape[2])):
        first, _rest = gl.split(parts.reshape((ROWS, 4, parts.shape[2] // 2, 2)))
        parts = first
    return gl.convert_layout(parts.reshape((ROWS, 4)), OWN, assert_trivial=True)


@constexpr_function
def _log2(number):
    return number.bit_length() - 1


@gluon.jit
def add_sink(sink, maximum, total, LOG2_UNIT: gl.constexpr):
    """Return the factor of earlier sums, the new maximum and the new sum, as
    `online_softmax.add_sink` does.

    The number 2^LOG2_UNIT represents a weight of 1.
    """
    new_maximum = gl.maximum(maximum, sink)
    origin = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = gl.exp2(maximum - origin)
    return rescale, new_maximum, total * rescale + gl.exp2(sink - origin + LOG2_UNIT)
