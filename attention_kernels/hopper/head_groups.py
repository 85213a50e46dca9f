"""Size of a head group: the heads that the programs of the Hopper kernels work on at a time.

Programs that work on the same head share its keys and values in the L2 cache, so small groups load
the least from memory. If tiles differ in length, as below a diagonal, the size of a group also
determines whether programs end together. A group's tiles are numbered from the longest to the
shortest. If a group ends in the middle of a turn, some programs get the shortest tiles of that
group, and other programs get the longest tiles of the next. With 32 heads of 8,192 keys, a diagonal
and 132 programs, the busiest program has 1.66 times the average work in groups of 4 heads and 1.006
times in groups of 11. If every group begins in a new turn, and some programs have no tile in a
group's last turn, it is 1.001 times in groups of 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CACHED_BYTES = 12 * 2**20
"""Maximum size of a group's keys and values, in bytes, that stays in the L2 cache after one
load."""
UNCACHED_BYTES = 64 * 2**20
"""Minimum size of a group's keys and values, in bytes, for which none stay in the L2 cache: each
program, or each set of programs that read together, loads them from memory."""
MEASURE = 2**16
"""Unit to which a head's size is rounded up, in bytes: 128 keys and values of 128 numbers."""
ALONE = 0.25
"""Relative slowdown of a call with `UNCACHED_BYTES` or more, if no two programs read the same keys.
If n programs read the same keys, the slowdown is divided by n. Fitted to slowdowns of 40 and 23 %
with one program, 5 to 10 % with 2 to 3, and 0 to 9 % with 4 (H100)."""
TILE_BLOCKS = 2
"""Time of a tile's start and end, in blocks of keys; measured: 1.6 in 16 bits, 2.4 in FP8
(H100)."""
LEAST = 2
"""Minimum number of key heads in a group whose tiles are numbered by length. With one head, calls
of 512 and 1,024 keys below a diagonal took 1.5 and 1.3 times as long at head_dim 64 (H100, reason
unknown)."""
NEARLY = 1.01
"""A smaller group is chosen if it takes at most this many times as long as the best. Small groups
need less memory bandwidth: 256 heads of 2,048 keys, head_dim 128, took 1.3 times as long in groups
of 8 as in equally balanced groups of 2."""
EACH_TRIED = 12
"""With at most this many key heads, every group size is tried. Each size takes some 50 µs of CPU
time, once for each number of blocks."""
STEP = 1.15
"""Ratio of successive group sizes that are tried above `EACH_TRIED`."""


class HeadGroup(NamedTuple):
    """Bundles of query heads that are worked on at a time."""

    size: int
    """Number of bundles."""
    numbers: int
    """Number of consecutive numbers for the tiles of a group: one for each tile, or whole turns,
    whose last numbers have no tile."""


class VisibleKeys(NamedTuple):
    """Keys that queries see: query i sees i + diagonal - left to i + diagonal + right."""

    q_len: int
    kv_len: int
    diagonal: int
    left: int | None
    """Number of visible keys before the diagonal; None for all."""
    right: int | None
    """Number of visible keys after the diagonal; None for all. If not None, tiles are numbered by
    length."""
    queries: int
    """Number of queries in a tile."""
    keys: int
    """Number of keys in a block."""

    def in_whole_blocks(self) -> VisibleKeys:
        """Return the lengths rounded up to whole tiles and blocks, so that many calls are equal.
        Each tile sees as many blocks as before."""
        return self._replace(
            q_len=-(-self.q_len // self.queries) * self.queries,
            kv_len=-(-self.kv_len // self.keys) * self.keys,
        )


def head_group_of(
    visible: VisibleKeys, head_bytes: int, bundles: int, heads: int, programs: int
) -> HeadGroup:
    """Return the bundles of query heads that are worked on at a time.

    Args:
        visible: keys that queries see; if lengths differ, the keys of the longest sequence.
        head_bytes: size of a key head's keys and values, in bytes.
        bundles: number of bundles of query heads.
        heads: number of bundles that share a key head.
        programs: number of programs that share the tiles.
    """
    blocks = -(-visible.q_len // visible.queries)
    if visible.right is None:
        return HeadGroup(heads, heads * blocks)
    if blocks * bundles <= programs:
        return HeadGroup(bundles, bundles * blocks)
    head_bytes = -(-head_bytes // MEASURE) * MEASURE
    return _balanced(visible.in_whole_blocks(), head_bytes, bundles, heads, programs)


@functools.lru_cache(maxsize=1024)
def _balanced(
    visible: VisibleKeys, head_bytes: int, bundles: int, heads: int, programs: int
) -> HeadGroup:
    blocks = visible.q_len // visible.queries
    times = blocks_seen(visible) + TILE_BLOCKS
    average = int(times.sum()) * bundles / programs
    costs: dict[HeadGroup, float] = {}
    for key_heads in _tried(bundles // heads):
        slower = 1 + from_memory(key_heads, head_bytes, programs)
        tiles = key_heads * heads * blocks
        for numbers in (tiles, -(-tiles // programs) * programs):
            head_group = HeadGroup(key_heads * heads, numbers)
            cost = busiest_of(times, bundles, head_group, programs) / average
            costs[head_group] = cost * slower
        if costs[head_group] <= NEARLY:
            break
    least = min(costs.values())
    return next(each for each, cost in costs.items() if cost <= NEARLY * least)


def _tried(key_heads: int) -> Iterator[int]:
    """Yield the group sizes to try for `key_heads` heads, in ascending order."""
    size = LEAST
    while size < key_heads:
        yield size
        size = size + 1 if size < EACH_TRIED else math.ceil(size * STEP)
    yield key_heads


def from_memory(key_heads: int, head_bytes: int, programs: int) -> float:
    """Return the fitted slowdown of a call if its keys do not all stay in the L2 cache."""
    beyond = (key_heads * head_bytes - CACHED_BYTES) / (UNCACHED_BYTES - CACHED_BYTES)
    return ALONE * key_heads / programs * min(max(0.0, beyond), 1.0)


def busiest_of(times: Tensor, bundles: int, head_group: HeadGroup, programs: int) -> float:
    """Return the time of the busiest program.

    Args:
        times: times of the tiles of a bundle, in the order of their queries.
    """
    falling = times.flip(0)
    head_groups, rest = divmod(bundles, head_group.size)
    whole = falling.new_zeros(head_group.numbers)
    whole[: len(times) * head_group.size] = falling.repeat_interleave(head_group.size)
    tiles = torch.cat([whole.repeat(head_groups), falling.repeat_interleave(rest)])
    turns = -(-len(tiles) // programs)
    by_turn = tiles.new_zeros(turns * programs)
    by_turn[: len(tiles)] = tiles
    by_turn = by_turn.view(turns, programs)
    by_turn[1::2] = by_turn[1::2].flip(1)  # in the order of `tile_number`
    return float(by_turn.sum(0).max())


def blocks_seen(visible: VisibleKeys) -> Tensor:
    """Return the number of key blocks that each block of queries sees at least in part, as
    (blocks,) int64."""
    q_len, kv_len, diagonal, left, right, queries, keys = visible
    # The device is named, because another device may be the default.
    first_query = torch.arange(0, q_len, queries, device="cpu")
    last_query = first_query + queries - 1
    first, last = torch.zeros_like(first_query), torch.full_like(last_query, kv_len - 1)
    if left is not None:
        first = (first_query + diagonal - left).clamp(0, kv_len - 1)
    if right is not None:
        last = (last_query + diagonal + right).clamp(max=kv_len - 1)
    return (last // keys - first // keys + 1).clamp(min=1)


def most_cut(visible: VisibleKeys, *, has_lengths: bool) -> int | None:
    """Return the maximum number of a tile's key blocks that the right side cuts; None if only the
    last block is cut.

    Args:
        has_lengths: whether batch elements differ in length; `visible` describes the longest.
    """
    q_len, kv_len, diagonal, _, right, queries, keys = visible
    if right is None:
        return None
    if has_lengths:
        return queries // keys + 2
    first_query = torch.arange(0, q_len, queries, device="cpu")
    reached = (first_query + queries + diagonal + right).clamp(max=kv_len)
    seen_by_all = (first_query + 1 + diagonal + right).clamp(0, kv_len)
    cut = int(((reached + keys - 1) // keys - seen_by_all // keys).max())
    return cut if cut > 1 else None
