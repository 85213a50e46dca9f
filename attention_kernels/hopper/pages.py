"""Tiles of packed sequences whose keys lie in pages, and where these pages are.

The host knows the number of queries but not where sequences begin. Each tile therefore has a slot
(`key_ranges.sequence_at`), and slots past the last query of their sequence have no tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.key_ranges import sequence_at

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
    """Number of queries up to which a sequence has no tile, because another kernel computes it. Nor
    has a sequence whose length is negative."""
    PAGE_SIZE: Any


@gluon.jit
def tile_in_pages(turn, work, bounds, QUERIES: gl.constexpr, HEADS: gl.constexpr):
    """Return the sequence, first of HEADS query heads, and block of queries of a turn.

    The last slots come first, because the last tiles of a sequence are the longest in causal calls.
    """
    number = turn * gl.num_programs(0) + gl.program_id(0)
    bundles = work.q_heads // HEADS
    slot = work.tiles // bundles - 1 - number // bundles
    sequence = sequence_at(slot, bounds.q_offsets, bounds.pages.sequences, QUERIES)
    q_start = gl.load(bounds.q_offsets + sequence)
    q_len = gl.load(bounds.q_offsets + sequence + 1) - q_start
    block = slot - q_start // QUERIES - sequence
    is_left_out = (q_len <= bounds.pages.decoded) | (gl.load(bounds.k_lengths + sequence) < 0)
    block = gl.where(is_left_out, NOWHERE, block)
    return sequence, number % bundles * HEADS, block
