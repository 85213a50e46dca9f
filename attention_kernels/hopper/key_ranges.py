"""Queries and keys of a batch element, and the blocks of keys that its queries see.

Query i sees keys from `i + lowest` to `i + highest`. A causal mask sets only `highest`; a window
sets both. Blocks begin at multiples of their length from the element's first key. Blocks that the
diagonal, a side of the window or the last key cuts need a mask and come first:

    first        whole_first          whole_end        end
      ├─ masked ─────┼──── no mask ───────┼── masked ────┤
      4              3  7      6       5  2       1    0
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.scores import matrix


class CallBounds(NamedTuple):
    """Bounds of a call, for all its batch elements; None for bounds that the call does not have."""

    q_len: Any
    kv_len: Any
    diagonal: Any
    """Distance from a query to its diagonal key; None if the last query's diagonal key is the last
    key."""
    left: Any
    """Number of keys before the diagonal that a query sees."""
    right: Any
    """Number of keys after the diagonal that a query sees; 0 if a call is causal."""
    most_cut: Any = None
    """Maximum number of a tile's blocks that the right side cuts; None if only the last is."""
    q_offsets: Any = None
    """(B + 1,) for a packed call: the first query of each element, then the end of all queries."""
    k_starts: Any = None
    """First key of each element: (B + 1,) for a packed call, (B,) for a padded one, or None for
    0."""
    k_lengths: Any = None
    """(B,), number of valid keys from the first key on; None for all."""
    visited: Any = None
    """Blocks that a mask keeps visible: `VisitedBlocks.blocks` and `.counts`, and their strides in
    tiles, from one batch element and one head to the next."""
    aligned_to: Any = None
    """Number of queries in a tile, if the diagonal key of each tile's first query is a multiple of
    that number; None if a batch element's first tile begins at its first query."""
    pages: Any = None
    """A `pages.PageTable` if the keys of a packed call lie in pages."""


class ElementBounds(NamedTuple):
    """Bounds of a batch element."""

    q_start: Any
    """First row of the element among the queries in memory."""
    q_len: Any
    k_start: Any
    kv_len: Any
    lowest: Any
    """First key that query i sees, minus i, if the call has a left side."""
    highest: Any
    """Last key that query i sees, minus i, if the call has a right side."""


@gluon.jit
def element_bounds_of(batch, bounds):
    """Return the bounds of a batch element, whose queries and keys are indexed from its own first
    query and key."""
    q_start = 0
    q_len = bounds.q_len
    k_start = 0
    kv_len = bounds.kv_len
    diagonal = bounds.diagonal
    if bounds.q_offsets is not None:
        q_start = gl.load(bounds.q_offsets + batch).to(gl.int32)
        q_len = gl.load(bounds.q_offsets + batch + 1).to(gl.int32) - q_start
        if bounds.pages is not None:
            kv_len = gl.load(bounds.k_lengths + batch).to(gl.int32)
        else:
            k_start = gl.load(bounds.k_starts + batch).to(gl.int32)
            kv_len = gl.load(bounds.k_starts + batch + 1).to(gl.int32) - k_start
            if bounds.k_lengths is not None:
                kv_len = gl.minimum(kv_len, gl.load(bounds.k_lengths + batch).to(gl.int32))
    elif bounds.k_lengths is not None:
        kv_len = gl.load(bounds.k_lengths + batch).to(gl.int32)
        if bounds.k_starts is not None:
            k_start = gl.load(bounds.k_starts + batch).to(gl.int32)
            if diagonal is not None:
                diagonal -= k_start  # `diagonal` counts from the padded tensor's first key
    if diagonal is None:
        diagonal = kv_len - q_len
    lowest = 0
    if bounds.left is not None:
        lowest = diagonal - bounds.left
    highest = 0
    if bounds.right is not None:
        highest = diagonal + bounds.right
    return ElementBounds(q_start, q_len, k_start, kv_len, lowest, highest)


@gluon.jit
def sequence_at(slot, offsets, sequences, SIZE: gl.constexpr):
    """Return the sequence of a packed call that has tile number `slot`, of SIZE rows.

    Sequence b begins at slot offsets[b] // SIZE + b, so T // SIZE + B slots suffice for T tokens of
    B sequences. Some slots are past the end of their sequence.
    """
    low = slot * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins_before = gl.load(offsets + middle) // SIZE + middle <= slot
        low = gl.where(begins_before, middle, low)
        high = gl.where(begins_before, high, middle)
    return low


@gluon.jit
def first_query_of(block, element, bounds, QUERIES: gl.constexpr):
    """Return the first query of tile number `block` of a batch element.

    An aligned tile sees the same blocks of keys in every chunk of a sequence. The first tile of a
    chunk may then begin before the chunk's first query, at a negative number.
    """
    first = block * QUERIES
    if bounds.aligned_to is not None:
        if bounds.right is not None:
            diagonal = element.highest - bounds.right
        else:
            diagonal = element.lowest + bounds.left
        # On a GPU, the remainder has the sign of the diagonal.
        first -= (diagonal % bounds.aligned_to + bounds.aligned_to) % bounds.aligned_to
    return first


@gluon.jit
def tile_exists(first_query, element, bounds):
    """Return whether the tile exists. A packed sequence may be shorter than the longest, and the
    number of aligned tiles differs among batch elements."""
    exists = True
    if bounds.q_offsets is not None or bounds.aligned_to is not None:
        exists = first_query < element.q_len
    return exists


@gluon.jit
def memory_batch_of(batch, bounds):
    """Return the batch index of an element's rows in memory: 0 for all elements of a packed
    call."""
    memory_batch = batch
    if bounds.q_offsets is not None:
        memory_batch = batch * 0
    return memory_batch


@gluon.jit
def key_blocks_of(first_row, element, bounds, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return the range of key blocks that ROWS queries from `first_row` on see, as four block
    numbers: first block, first block that all queries see in full, end of such blocks, and end of
    all blocks.

    The range always has a last block, which needs a mask, even if no query sees a key. The last
    block contains keys if the element has any.
    """
    first = 0
    whole_first = 0
    last_key = element.kv_len
    last_whole = element.kv_len
    if bounds.right is not None:
        last_key = gl.minimum(last_key, first_row + ROWS + element.highest)
        last_whole = gl.minimum(last_whole, first_row + 1 + element.highest)
    if bounds.left is not None:
        last = gl.maximum(element.kv_len - 1, 0)
        first = gl.minimum(gl.maximum(first_row + element.lowest, 0), last) // KEYS
        whole_first = (gl.maximum(first_row + ROWS - 1 + element.lowest, 0) + KEYS - 1) // KEYS
    end = gl.maximum((last_key + KEYS - 1) // KEYS, first + 1)
    whole_end = end - 1
    if bounds.most_cut is not None:
        whole_end = gl.minimum(gl.maximum(last_whole, 0) // KEYS, whole_end)
    if bounds.left is not None:
        whole_first = gl.minimum(whole_first, end - 1)
        whole_end = gl.maximum(whole_end, whole_first)
    return first, whole_first, whole_end, end


@gluon.jit
def masked_of(blocks, bounds):
    """Return the number of blocks that need a mask, at least one, from the result of
    `key_blocks_of`. These blocks are numbered first."""
    first, whole_first, whole_end, end = blocks
    masked = 1
    if bounds.most_cut is not None:
        masked = end - whole_end
    if bounds.left is not None:
        masked += whole_first - first
    return masked


@gluon.jit
def block_at(number, blocks, bounds):
    """Return block number `number` of the result of `key_blocks_of`.

    Blocks that the right side cuts come first, then blocks that a window's left side cuts, and then
    blocks without a mask; each kind in descending order.
    """
    first, whole_first, whole_end, end = blocks
    block = end - 1 - number
    if bounds.left is not None:
        cut = end - whole_end
        masked = cut + whole_first - first
        without = gl.where(number < masked, whole_first + cut, whole_end + masked) - 1 - number
        block = gl.where(number < cut, block, without)
    return block


@gluon.jit
def sees(scores, first_query, first_key, element, bounds):
    """Return whether queries from `first_query` on see keys from `first_key` on, in the scores'
    shape."""
    seen = _before_end(scores, first_query, first_key, element, bounds)
    if bounds.left is not None:
        seen = seen & _behind_begin(scores, first_query, first_key, element)
    return seen


@gluon.jit
def hide_unseen(scores, first_query, first_key, element, bounds):
    """Replace scores by -inf where queries from `first_query` on do not see keys from `first_key`
    on.

    Few blocks are cut on both sides, so large blocks are compared only with sides that cut them.
    """
    if bounds.left is None or scores.shape[1] < 128:
        seen = sees(scores, first_query, first_key, element, bounds)
        scores = gl.where(seen, scores, float("-inf"))
    else:
        end = element.kv_len
        if bounds.right is not None:
            end = gl.minimum(end, first_query + 1 + element.highest)
        if first_key + scores.shape[1] > end:
            seen = _before_end(scores, first_query, first_key, element, bounds)
            scores = gl.where(seen, scores, float("-inf"))
        if first_key < first_query + scores.shape[0] - 1 + element.lowest:
            seen = _behind_begin(scores, first_query, first_key, element)
            scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _before_end(scores, first_query, first_key, element, bounds):
    """Return whether keys lie before the end of the keys and within the window's right side."""
    own, queries, threads = _places_of(scores)
    queries, end = gl.broadcast(queries, element.kv_len - first_key - 2 * threads)
    if bounds.right is not None:
        end = gl.minimum(
            end, queries + (first_query + element.highest + 1 - first_key) - 2 * threads
        )
    seen = own < end[:, None, :, None]
    LAYOUT: gl.constexpr = scores.type.layout
    return gl.convert_layout(seen.reshape(scores.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _behind_begin(scores, first_query, first_key, element):
    """Return whether keys are at or after the beginning of the window."""
    own, queries, threads = _places_of(scores)
    begin = queries + (first_query + element.lowest - first_key) - 2 * threads
    seen = own >= begin[:, None, :, None]
    LAYOUT: gl.constexpr = scores.type.layout
    return gl.convert_layout(seen.reshape(scores.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _places_of(scores):
    """Return the positions of keys without the thread's part, of queries, and of threads, for
    scores as (rows, eights, threads, pairs).

    Four threads share a row, and each has two of every eight scores. Positions within a thread are
    separate numbers, which are known at compile time.
    """
    EIGHTS: gl.constexpr = scores.shape[1] // 8
    PARTS: gl.constexpr = scores.reshape((scores.shape[0], EIGHTS, 4, 2)).type.layout
    ROWS_AND_EIGHTS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, PARTS))
    ROWS_AND_THREADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, PARTS))
    eights = gl.arange(0, EIGHTS, gl.SliceLayout(0, ROWS_AND_EIGHTS))[None, :, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PARTS))))
    threads = gl.arange(0, 4, gl.SliceLayout(0, ROWS_AND_THREADS))[None, :]
    queries = gl.arange(0, scores.shape[0], gl.SliceLayout(1, ROWS_AND_THREADS))[:, None]
    return eights * 8 + pair[None, None, None, :], queries, threads


@gluon.jit
def store_rows(block, pointer, stride_token, first, element, V_HEAD_DIM: gl.constexpr):
    """Store a block of output from shared memory, for a batch element's queries from `first` on.

    Rows of other queries are not stored. `pointer` points to the head.
    """
    DV: gl.constexpr = block.shape[3]
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    stored = matrix(block).load(STORED)
    queries = first + gl.arange(0, stored.shape[0], gl.SliceLayout(1, STORED))
    columns = gl.arange(0, DV, gl.SliceLayout(0, STORED))
    at = (element.q_start + queries).to(gl.int64)[:, None] * stride_token + columns[None, :]
    inside = is_own(queries, element)[:, None] & (columns < V_HEAD_DIM)[None, :]
    gl.store(pointer + at, stored, mask=inside)


@gluon.jit
def is_own(queries, element):
    """Return whether queries are a batch element's own, neither before its first nor after its
    last."""
    return queries.to(gl.uint32) < element.q_len.to(gl.uint32)


@gluon.jit
def visited_blocks_at(batch, head, tile, bounds, KEYS: gl.constexpr):
    """Return a tile's lists of blocks: pointers to the blocks without and with the mask, and the
    number of blocks in each list."""
    blocks, counts, stride_batch, stride_head = bounds.visited
    width = (bounds.kv_len + KEYS - 1) // KEYS
    place = (batch * stride_batch + head * stride_head + tile).to(gl.int64)
    plain = blocks + place * 2 * width
    return plain, plain + width, gl.load(counts + place * 2), gl.load(counts + place * 2 + 1)


@gluon.jit
def visited_key(i, visited, bounds, KEYS: gl.constexpr):
    """Return the first key of block number i; blocks that need the mask come first.

    If no key is visible, one block is visited nevertheless, after the last key. This block also
    begins at a multiple of KEYS, because TMA failed with an illegal instruction for a block at byte
    130 of a mask's rows (H200).
    """
    plain, masked, plain_count, masked_count = visited
    pointer = masked + i
    if i >= masked_count:
        pointer = plain + (i - masked_count)
    behind = (bounds.kv_len + KEYS - 1) // KEYS * KEYS
    return gl.load(pointer, mask=i < plain_count + masked_count, other=behind)
