"""Tiles of keys of the backward passes for Hopper GPUs, in Gluon.

The kernels share which blocks of queries see a tile, how these are loaded, which scores are hidden,
and how the gradients of the keys are stored. Block number `count`, counted from the start of a
program, is in buffer `count % STAGES`, in phase `count // STAGES` (`pipeline.py`):

- `key_value`: one phase, which ends when keys and values are loaded.
- `query`, `grad_output`: a phase ends when TMA has written the buffer, once per block.
- `empty`: a phase ends when both consumers have arrived, after their last read of a block's query
  and dO. Before it fills a buffer, the loading warp waits for the phase before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attention_kernels.hopper.key_ranges import ElementBounds, element_bounds_of, sequence_at
from attention_kernels.hopper.pipeline import meet, tma_load
from attention_kernels.hopper.scores import ROWS

STAGES = gl.constexpr(2)
"""Number of buffers for blocks of queries, and for blocks of dO."""
NEVER = gl.constexpr(2**30)
"""A query after all others."""


class Barriers(NamedTuple):
    """Barriers in shared memory, described at the top."""

    key_value: Any
    query: Any
    grad_output: Any
    empty: Any


class Tile(NamedTuple):
    """A program's tile of keys, and the blocks of queries that see some of them.

    In a packed call, keys are numbered as in memory, and blocks of queries as those of the
    log-sum-exp. The numbers of the first key and query then need no registers of their own.
    """

    batch: Any
    """Batch index in memory, 0 in a packed call."""
    kv_head: Any
    element: Any
    """`ElementBounds` of the batch element or sequence."""
    first_key: Any
    begin: Any
    """First block that sees a key of the tile."""
    whole: Any
    """First block from `begin` on all of whose queries see the whole tile."""
    whole_end: Any
    """End of such blocks."""
    end: Any
    cut: Any
    """1 if the end of a packed sequence cuts block `end`, and that block sees the tile, else 0. It
    comes before block `whole`."""


class Call(NamedTuple):
    """Numbers that all programs of a call share."""

    scale: Any
    """Scale of the scores in base 2. With a cap, the scale of tanh's argument."""
    cap: Any
    """Soft cap in base 2, or None."""
    grad_scale: Any
    """Scale of the scores."""
    bounds: Any
    """`CallBounds`"""
    sequences: Any
    """Number of sequences of a packed call."""
    blocks: Any
    """Number of blocks of queries of a head, of all sequences."""
    kv_heads: Any
    group: Any
    """Number of query heads that share a key head."""


@gluon.jit
def tile_of(program, call, tiles, head_group, M: gl.constexpr, N: gl.constexpr):
    """Return a program's tile."""
    bounds = call.bounds
    in_group = head_group * tiles
    place = program % in_group
    which = program // in_group * head_group + place % head_group
    number = place // head_group
    batch = which // call.kv_heads
    if bounds.q_offsets is None:
        element = element_bounds_of(batch, bounds)
        first = number * N
        end = call.blocks
    else:
        sequence = sequence_at(number, bounds.k_starts, call.sequences, N)
        element = element_bounds_of(sequence, bounds)
        first = (number - element.k_start // N - sequence) * N
        first = gl.where(first < 0, NEVER, first)  # before the first sequence
        end = gl.where(first < element.kv_len, (element.q_len + M - 1) // M, 0)
    last = gl.minimum(first + N, element.kv_len) - 1
    cut = 0
    if bounds.left is not None:
        seen = gl.maximum(last - element.lowest + 1, 0)
        end = gl.minimum(end, (seen + M - 1) // M)
    if bounds.q_offsets is not None:
        cut = gl.where(end > element.q_len // M, 1, 0)
        end = end - cut
    begin = 0
    whole = 0
    if bounds.right is not None:
        begin = gl.maximum(first - element.highest, 0) // M
        if bounds.q_offsets is not None:
            cut = gl.where(begin > end, 0, cut)
        whole = (gl.maximum(last - element.highest, 0) + M - 1) // M
    begin = gl.minimum(begin, end)
    whole = gl.minimum(gl.maximum(whole, begin), end)
    whole = gl.where(first + N > element.kv_len, end, whole)
    whole_end = end
    if bounds.left is not None:
        whole_end = gl.maximum(first - element.lowest + 1, 0) // M
        whole_end = gl.minimum(gl.maximum(whole_end, whole), end)
    kv_head = which % call.kv_heads
    if bounds.q_offsets is not None:
        block = element.q_start // M + sequence
        first += element.k_start
        begin += block
        whole += block
        whole_end += block
        end += block
        moved = element.k_start - block * M
        element = ElementBounds(
            element.q_start - block * M, element.q_len + block * M, 0,
            element.kv_len + element.k_start, element.lowest + moved, element.highest + moved,
        )  # fmt: skip
    return Tile(batch, kv_head, element, first, begin, whole, whole_end, end, cut)


@gluon.jit
def load_tile(descriptors, buffers, barriers, tile, call):
    """Run the loading warp: load keys and values, then each block as soon as a buffer is free."""
    q_desc, k_desc, v_desc, grad_output_desc, logarithms_desc, deltas_desc = descriptors
    M: gl.constexpr = q_desc.block_type.shape[2]
    full = barriers.key_value.index(0)
    mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    place = [tile.batch, tile.kv_head, tile.first_key, 0]
    tma_load(k_desc, place, full, buffers.key)
    tma_load(v_desc, place, full, buffers.value)
    count = 0
    for member in range(call.group):
        head = tile.kv_head * call.group + member
        row = (tile.batch * call.kv_heads * call.group + head) * call.blocks * M
        for turn in range(tile.begin, tile.end + tile.cut):
            block = turn
            if call.bounds.q_offsets is not None:
                block = gl.where(turn < tile.whole + tile.cut, tile.end, turn - tile.cut)
                block = gl.where(turn < tile.whole, turn, block)
            stage, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
            place = [tile.batch, head, tile.element.q_start + block * M, 0]
            full = barriers.query.index(stage)
            mbarrier.expect(full, q_desc.block_type.nbytes + logarithms_desc.block_type.nbytes)
            tma_load(q_desc, place, full, buffers.query.index(stage))
            tma_load(logarithms_desc, [row + block * M], full, buffers.logarithms.index(stage))
            full = barriers.grad_output.index(stage)
            mbarrier.expect(
                full, grad_output_desc.block_type.nbytes + deltas_desc.block_type.nbytes
            )
            tma_load(grad_output_desc, place, full, buffers.grad_output.index(stage))
            tma_load(deltas_desc, [row + block * M], full, buffers.deltas.index(stage))
            count += 1


@gluon.jit
def hide_unseen(scores, first_query, tile, call, WHO: gl.constexpr):
    """Set scores (ROWS keys, M queries) of keys that a query does not see to -inf."""
    LAYOUT: gl.constexpr = scores.type.layout
    own = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    queries = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    first_key = tile.first_key + WHO * ROWS
    element = tile.element
    # The first query that sees a key, counted from the block's first, is compared with a constant.
    first = own * 0
    if call.bounds.right is not None:
        first = own + (first_key - element.highest - first_query)
    first = gl.where(own < element.kv_len - first_key, first, NEVER)
    scores = gl.where(first[:, None] <= queries, scores, float("-inf"))
    if call.bounds.left is not None:
        last = own + (first_key - element.lowest - first_query)
        scores = gl.where(queries <= last[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def store_gradients(gradients, buffer, target, tile, WHO: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Store HEAD_DIM columns of the gradients of a consumer's keys or values, (ROWS, D), 16 bytes
    at a time: threads exchange their numbers through `buffer` of the same shape."""
    pointer, stride_batch, stride_head, stride_row = target
    D: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    meet()
    buffer.store(gradients.to(buffer.dtype))
    meet()
    rows = tile.first_key + WHO * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    pointer += tile.batch.to(gl.int64) * stride_batch + tile.kv_head.to(gl.int64) * stride_head
    element = tile.element
    places = (rows.to(gl.int64) * stride_row)[:, None] + columns[None, :]
    inside = (rows < element.kv_len)[:, None]
    if HEAD_DIM < D:
        inside = inside & (columns < HEAD_DIM)[None, :]
    gl.store(pointer + places, buffer.load(LAYOUT), mask=inside)
