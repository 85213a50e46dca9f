"""Tiles of packed sequences whose keys lie in pages, and where these pages are.

The host knows the number of queries T but not where sequences begin. Sequence b begins at slot
offsets[b] // QUERIES + b, so T // QUERIES + B slots suffice for every head. Slots past the last
query of their sequence have no tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NOWHERE = gl.constexpr(2**20)
"""A block of queries that no sequence has."""


class PageTable(NamedTuple):
    """Pages of the sequences of a call."""

    table: Any
    """Pointer to (B, N) int32."""
    stride: Any
    """Stride between the rows of the table."""
    sequences: Any
    """B."""
    decoded: Any
    """Number of queries up to which a sequence has no tile, because another kernel computes it."""
    PAGE_SIZE: Any


@gluon.jit
def tile_in_pages(turn, work, bounds, QUERIES: gl.constexpr, HEADS: gl.constexpr):
    """Return the sequence, first of HEADS query heads, and block of queries of a turn.

    The last slots come first, because the last tiles of a sequence are the longest in causal calls.
    """
    number = turn * gl.num_programs(0) + gl.program_id(0)
    bundles = work.q_heads // HEADS
    slot = work.tiles // bundles - 1 - number // bundles
    low = slot * 0
    high = low + bounds.pages.sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins_before = gl.load(bounds.q_offsets + middle) // QUERIES + middle <= slot
        low = gl.where(begins_before, middle, low)
        high = gl.where(begins_before, high, middle)
    q_start = gl.load(bounds.q_offsets + low)
    q_len = gl.load(bounds.q_offsets + low + 1) - q_start
    block = slot - q_start // QUERIES - low
    block = gl.where(q_len <= bounds.pages.decoded, NOWHERE, block)
    return low, number % bundles * HEADS, block
