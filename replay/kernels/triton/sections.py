"""How many heads the programs of the Hopper kernels work on at a time (`persistent.place_of`).

Keys and values of a section should stay in the L2 cache. Where tiles differ in length, as below a
diagonal, a section's size also decides whether programs end together: its tiles are numbered from
the longest to the shortest, so where one section ends in the middle of a turn, some programs get
the shortest tiles of that one and others the longest of the next. With 32 heads of 8,192 keys, a
diagonal and 132 programs, the busiest has 1.66 times the average in sections of 4 heads and 1.006
times in sections of 11.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PLAIN_BYTES = 24 * 2**20
"""Of a section's keys and values where all tiles are equally long."""
MOST_BYTES = 64 * 2**20
"""Where they are not: with more heads it is easier to balance long with short."""
FROM_MEMORY = 1.08
"""What a section of all heads costs where their keys and values are more: 0 to 9 % of the time,
measured on an H100 where it was as even as sections of less."""
EVEN = 1.01
"""The busiest program's work, relative to the average, with which no better section is looked
for."""
MOST_TRIED = 24
"""Sizes that are looked at; each takes a CPU some 50 µs, once for each shape of a call whose keys
and values do not fit the L2 together."""
TILE_BLOCKS = 2
"""Blocks of keys whose time a tile's beginning and end take: 1.6 in 16 bits, 2.4 in FP8 (H100)."""


class Sight(NamedTuple):
    """What queries see: number i the keys from i + diagonal - left to i + diagonal + right."""

    q_len: int
    kv_len: int
    diagonal: int
    left: int | None
    """None: all before the diagonal, or after it."""
    right: int | None
    queries: int
    """Of a tile."""
    keys: int
    """Of a block."""


def section_of(
    head_bytes: int,
    bundles: int,
    heads: int,
    programs: int,
    by_length: bool,
    sight: Sight | None,
) -> int:
    """How many bundles of query heads are worked on at a time.

    Args:
        head_bytes: of a key head's keys and values.
        bundles: there are of query heads.
        heads: bundles that share a key head.
        programs: that share the tiles.
        by_length: whether tiles are numbered by their length.
        sight: what makes them differ, where the host knows it.
    """
    most = MOST_BYTES if by_length else PLAIN_BYTES
    largest = min(max(1, most // head_bytes) * heads, bundles)
    if not by_length or sight is None or largest == bundles:
        return largest
    blocks = blocks_seen(sight)
    best, least = bundles, FROM_MEMORY * busiest_of(blocks, bundles, bundles, programs)
    for section in range(largest, 0, -heads)[:MOST_TRIED]:
        busiest = busiest_of(blocks, bundles, section, programs)
        if busiest < least:
            best, least = section, busiest
        if busiest <= EVEN:
            break
    return best


def busiest_of(blocks: Tensor, bundles: int, section: int, programs: int) -> float:
    """The work of the program that has most, relative to the average.

    Args:
        blocks: of keys that each block of queries sees, as of `blocks_seen`.
    """
    falling = blocks.flip(0) + TILE_BLOCKS
    sections, rest = divmod(bundles, section)
    tiles = torch.cat(
        [
            falling.repeat_interleave(section).repeat(sections),
            falling.repeat_interleave(rest),
        ]
    )
    turns = -(-len(tiles) // programs)
    by_turn = tiles.new_zeros(turns * programs)
    by_turn[: len(tiles)] = tiles
    by_turn = by_turn.view(turns, programs)
    by_turn[1::2] = by_turn[1::2].flip(1)  # as `tile_number` has it
    sums = by_turn.sum(0)
    return int(sums.max()) * programs / int(sums.sum())


def blocks_seen(sight: Sight) -> Tensor:
    """How many blocks of keys each block of queries sees a part of, (blocks,) int64."""
    q_len, kv_len, diagonal, left, right, queries, keys = sight
    first_query = torch.arange(0, q_len, queries)
    last_query = first_query + queries - 1
    first, last = torch.zeros_like(first_query), torch.full_like(last_query, kv_len - 1)
    if left is not None:
        first = (first_query + diagonal - left).clamp(0, kv_len - 1)
    if right is not None:
        last = (last_query + diagonal + right).clamp(max=kv_len - 1)
    return (last // keys - first // keys + 1).clamp(min=1)
