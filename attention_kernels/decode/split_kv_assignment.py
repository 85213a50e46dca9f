"""Assignment of keys to programs for sequences whose different lengths only the GPU knows.

The host launches the same number of programs for any lengths. Each program reads all lengths,
computes the same maximum size of a part, and finds its own part by counting the parts before it. A
longer sequence has more parts, and all parts are about equally long, so that programs end at about
the same time. Programs that have no part end immediately.

If a part has at most c blocks, the n blocks of a head make ⌈n / c⌉ parts, at most n / c + 1. Let c
be at least the total number of blocks divided by `shares`. Then there are at most `shares` parts
plus one per head, and this many programs are launched.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attention_kernels.tiles.uniform import uniform


class KeyAssignment(NamedTuple):
    """Numbers from which, with the lengths, the GPU assigns keys to programs."""

    shares: int
    """Number of parts that the keys of all heads are split into, not counting one part per head."""
    resident: int
    """Number of parts that fill the GPU; with fewer, some multiprocessors would be idle."""
    least: int
    """Minimum number of key blocks in a part, so that the start of a program is short in
    comparison. Parts are smaller only if there would be fewer than `resident` parts."""
    worth: float
    """Limit on (number of parts)² per block of a head's keys; beyond this limit, merging takes
    longer than splitting saves."""

    def programs(self, heads: int) -> int:
        """Return the number of programs for `heads` key heads, B · Hkv."""
        return heads + self.shares


@triton.jit
def seen_positions(
    length,
    q_len,
    left,
    right,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
):
    """Return the first position that any query sees, the end of the visible positions, and the last
    position that query 0 sees under a diagonal.

    `length` may be a scalar or a tensor. The first position is a multiple of ROUNDED_TO.
    """
    diagonal = length * 0
    if IS_BOTTOM_RIGHT:
        diagonal = length - q_len
    begin = length * 0
    end = length
    if IS_CAUSAL:
        end = tl.minimum(length, q_len + diagonal)
    if right is not None:
        end = tl.minimum(length, q_len + diagonal + right)
    if left is not None:
        begin = tl.maximum(diagonal - left, 0) // ROUNDED_TO * ROUNDED_TO
    return begin, end, diagonal


@triton.jit
def own_parts(
    batch,
    lengths_ptr,
    kv_len,
    q_len,
    left,
    right,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the number of keys in a part of a sequence, PART or more, and the number of parts,
    from 1 to MOST_PARTS."""
    length = kv_len
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + batch)
    begin, end, _ = seen_positions(length, q_len, left, right, IS_CAUSAL, IS_BOTTOM_RIGHT, 1)
    blocks = tl.cdiv(end - begin, BLOCK_N)
    share = tl.maximum(tl.cdiv(blocks, MOST_PARTS) * BLOCK_N, PART)
    return share, tl.maximum(tl.cdiv(end - begin, share), 1)


@triton.jit
def assigned_part(
    program,
    lengths_ptr,
    sequences,
    kv_heads,
    q_len,
    left,
    right,
    shares,
    resident,
    least,
    worth,
    q_starts_ptr,
    IS_CAUSAL: tl.constexpr,
    IS_BOTTOM_RIGHT: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """Return a program's sequence, key head and part, and the number of parts of that head.

    The returned sequence is `sequences` if there is no work for the program. Sequences of a packed
    batch that have no queries, or more than `q_len`, have no parts.
    """
    own = tl.arange(0, BLOCK_SEQUENCES)
    is_own = own < sequences
    if q_starts_ptr is not None:
        starts = tl.load(q_starts_ptr + own, mask=is_own, other=0)
        q_lens = tl.load(q_starts_ptr + own + 1, mask=is_own, other=0) - starts
        is_own = (q_lens > 0) & (q_lens <= q_len)
        q_len = q_lens
    lengths = tl.load(lengths_ptr + own, mask=own < sequences, other=0)
    begin, end, _ = seen_positions(
        lengths, q_len, left, right, IS_CAUSAL, IS_BOTTOM_RIGHT, ROUNDED_TO
    )
    blocks = tl.where(is_own, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), 0)
    together = tl.sum(blocks, axis=0) * kv_heads
    largest = tl.maximum(tl.cdiv(together, shares), tl.minimum(tl.cdiv(together, resident), least))
    parts = tl.cdiv(blocks, tl.maximum(largest, 1))
    parts = tl.minimum(parts, tl.sqrt(blocks.to(tl.float32) * worth).to(tl.int32))
    parts = tl.where(is_own, tl.maximum(parts, 1), 0)
    ends = tl.cumsum(parts, axis=0) * kv_heads
    is_before = (ends <= program) & (own < sequences)
    sequence = uniform(tl.sum(is_before.to(tl.int32), axis=0))
    before = uniform(tl.sum(tl.where(is_before, parts, 0), axis=0)) * kv_heads
    own_parts = uniform(tl.maximum(tl.sum(tl.where(own == sequence, parts, 0), axis=0), 1))
    place = program - before
    return sequence, place // own_parts, place % own_parts, own_parts
