"""8-bit operands of `quantised_hopper_kernel.py`: queries, which a consumer quantises itself, and
the positions of stored keys and values and of their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.core import PropagateNan

from attention_kernels.hopper.scores import ROWS
from attention_kernels.quantised.quantise import GROUP, first_group
from attention_kernels.tiles.division import quotient
from attention_kernels.tiles.round_to_eight_bits import FP8_MAX, INT8_MAX, SMALLEST_MAXIMUM

ALL = gl.constexpr(PropagateNan.ALL)
SCALE_GROUP = gl.constexpr(GROUP)
"""Number of keys, or values, that share a scale."""


class QueryRows(NamedTuple):
    """A consumer's queries of a tile."""

    query: Any
    """(ROWS, D) in 8 bits, in shared memory."""
    scale: Any
    """(ROWS,), scales of the queries times softmax's scale."""
    shift: Any
    """(ROWS,), the term that the mean of the keys would add to scores, or None."""
    first: Any


class StoredKeys(NamedTuple):
    """Position of a tile's keys and values in 8 bits."""

    head: Any
    """Key head, numbered over the whole batch."""
    group: Any
    """First group of the batch element within the head."""


@gluon.jit
def times_mean(block, mean_ptr, factor, D: gl.constexpr, SCORES: gl.constexpr):
    """Return the term that the subtracted mean of the keys would add to a row's scores, (ROWS,).

    Args:
        block: (1, 1, ROWS, D) queries in shared memory, in 16 bits.
        mean_ptr: pointer to the head's mean, (D,).
        factor: factor of products of query and key.
        SCORES: layout of scores.
    """
    LAYOUT: gl.constexpr = _four_threads_a_row(D)
    query = block.reshape((ROWS, D)).load(LAYOUT).to(gl.float32)
    mean = gl.load(mean_ptr + gl.arange(0, D, gl.SliceLayout(0, LAYOUT)))
    products = gl.sum(query * mean[None, :], 1) * factor
    return gl.convert_layout(products, gl.SliceLayout(1, SCORES), assert_trivial=True)


@gluon.jit
def quantise_query(block, factor, buffer, SCORES: gl.constexpr):
    """Quantise a consumer's queries times `factor` into `buffer` (ROWS, D) in shared memory, and
    return their scales (ROWS,). `block` is as for `times_mean`.

    If a row is not finite, one of its numbers (FP8) or its scale (INT8) is NaN.
    """
    D: gl.constexpr = buffer.shape[1]
    query = block.reshape((ROWS, D)).load(_four_threads_a_row(D)).to(gl.float32)
    largest = gl.reduce(gl.abs(query), 1, _larger_or_nan) * gl.abs(factor)
    not_finite = largest * 0.0
    largest = gl.maximum(largest, SMALLEST_MAXIMUM)
    if buffer.dtype == gl.int8:
        query = gl.floor(query * (factor * INT8_MAX / largest)[:, None] + 0.5)
        scale = largest / INT8_MAX + not_finite
    else:
        query = query * (factor * FP8_MAX / largest)[:, None]
        scale = gl.where(not_finite == 0.0, largest / FP8_MAX, 1.0)
    buffer.store(query.to(buffer.dtype))
    fence_async_shared()
    return gl.convert_layout(scale, gl.SliceLayout(1, SCORES), assert_trivial=True)


@gluon.jit
def _larger_or_nan(left, right):
    return gl.maximum(left, right, propagate_nan=ALL)


@constexpr_function
def _four_threads_a_row(D):
    """Return the layout of (ROWS, D) queries in which each thread has the same rows as in scores.

    The columns are chosen so that eight threads, each reading 16 bytes at a time, access different
    banks of shared memory in TMA's 16-bit layout.
    """
    columns = [[0, 1 << bit] for bit in range(D.bit_length() - 1)]
    quad = 4 if D >= 64 else 3  # first column bit that differs between a row's threads
    lanes = [*columns[quad : quad + 2], [1, 0], [2, 0], [4, 0]]
    registers = [*columns[:quad], *columns[quad + 2 :], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, D])


@gluon.jit
def stored_keys_of(batch, q_head, element, work, bounds, of_group):
    """Return the position of a query head's keys; `of_group` is the `reciprocal` of the number of
    query heads that share a key head."""
    first = 0
    if bounds.q_offsets is None:
        at = quotient(batch * work.q_heads + q_head, of_group)
    else:
        at = quotient(q_head, of_group)
        first = first_group(element.k_start, batch, SCALE_GROUP)
    return StoredKeys(at, first)


@gluon.jit
def scales_of(scales, block, bounds, KEYS: gl.constexpr, FP8_VALUE: gl.constexpr):
    """Return the key scale and the value scale of a block; 16-bit values have no scale.

    Args:
        scales: pointers to the first scales of the batch element.
        block: number of the block within the batch element.
    """
    key_scale_ptr, value_scale_ptr = scales
    group = block * KEYS // SCALE_GROUP
    if bounds.visited is not None:
        # If no key is visible, the visited block may be after the last.
        group = gl.minimum(group, (bounds.kv_len - 1) // SCALE_GROUP)
    of_keys = gl.load(key_scale_ptr + group)
    of_values = gl.load(value_scale_ptr + group) if FP8_VALUE else of_keys
    return of_keys, of_values
