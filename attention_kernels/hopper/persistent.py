"""Tiles of a persistent program of the Hopper kernels, and their order.

A program stays on its multiprocessor and computes one tile (a block of queries of one head) after
another, or a piece of a tile that several programs share (`stream_k.py`). Tiles are derived from
the program's number, so the loading warp and the consumers of a program agree without
communication.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.head_groups import HeadGroup
from attention_kernels.hopper.key_ranges import key_blocks_of, tile_exists
from attention_kernels.hopper.stream_k import blocks_of_piece, tile_of_piece, turns_with_pieces
from attention_kernels.tiles.division import quotient, reciprocal


class Work(NamedTuple):
    """Numbers of a call from which a program computes its tiles."""

    q_heads: Any
    tiles: Any
    """Number of tiles, including the numbers without a tile between head groups."""
    turns: Any
    """Number of turns in which every program has a number."""
    blocks: Any
    """Number of blocks of queries in a head."""
    bundles: Any
    """Number of bundles in the batch. A bundle is the set of query heads of one tile."""
    head_group: Any
    """Number of bundles that are worked on at a time (`head_groups.HeadGroup.size`)."""
    group_numbers: Any
    """As `head_groups.HeadGroup.numbers`."""
    reciprocals: Any
    """Reciprocals of `q_heads`, of `group_numbers`, of `head_group`, and of the number of bundles
    of the last group."""
    share: Any = None
    """A `stream_k.ProgramShare` if the tiles of the last turn are shared, else None."""


@gluon.jit
def turns_of_program(work, BY_LENGTH: gl.constexpr):
    """Return the number of turns of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    if work.share is None:
        turns = turns_of(work.tiles, work.turns, program, programs, BY_LENGTH)
    else:
        turns = turns_with_pieces(work.turns)
    return turns


@gluon.jit
def tile_of(turn, work, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr):
    """Return the tile of a turn: batch element, first of HEADS query heads, and block of
    queries. The block is negative if the program has no tile in this turn."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    if work.share is None:
        number = tile_number(turn, program, programs, BY_LENGTH)
    else:
        number = tile_of_piece(turn, work.turns, work.share, program, programs)
    of_q_heads, of_head_groups, of_head_group, of_last = work.reciprocals
    bundle, block = place_of(
        number,
        work.blocks,
        work.bundles,
        work.head_group,
        work.group_numbers,
        of_head_groups,
        of_head_group,
        of_last,
        BY_LENGTH,
    )
    head = bundle * HEADS
    batch = quotient(head, of_q_heads)
    return batch, head - batch * work.q_heads, block


@gluon.jit
def has_tile(
    turn,
    first,
    element,
    work,
    bounds,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    BY_LENGTH: gl.constexpr,
):
    """Return whether there is work in a turn; `first` is the first query of the turn's tile.

    An aligned tile may begin before query 0, but a number without a tile is a whole tile before it.
    """
    has_some = tile_exists(first, element, bounds)
    if BY_LENGTH:
        has_some = has_some & (first > -QUERIES)
    if work.share is not None:
        begin, _, _, end = blocks_of_tile(turn, first, element, work, bounds, QUERIES, KEYS)
        has_some = begin < end
    return has_some


@gluon.jit
def blocks_of_tile(turn, first, element, work, bounds, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """Return `key_blocks_of` for the tile of a turn, or for the program's piece of that tile."""
    begin, whole_first, whole_end, end = key_blocks_of(first, element, bounds, QUERIES, KEYS)
    if work.share is not None:
        program, programs = gl.program_id(0), gl.num_programs(0)
        shared = work.tiles - work.turns * programs
        begin, end = blocks_of_piece(turn - work.turns, shared, work.share, begin, end, program)
        if bounds.left is None:
            whole_first = begin
        else:
            whole_first = gl.maximum(gl.minimum(whole_first, end - 1), begin)
        if bounds.most_cut is None:
            whole_end = end - 1
        else:
            whole_end = gl.maximum(gl.minimum(whole_end, end - 1), whole_first)
    return begin, whole_first, whole_end, end


@gluon.jit
def tile_number(turn, program, programs, BY_LENGTH: gl.constexpr):
    """Return the number of a program's tile in a turn. In the last turn, the tile may not exist.

    BY_LENGTH: the call is causal or has a window, and tiles are numbered by decreasing length.
    Programs take tiles in order in even turns and in reverse order in odd turns. If all turns had
    one order, the same program would have the longer tile in every turn. Without BY_LENGTH, tiles
    are taken in order, which is better for the L2 cache.
    """
    number = turn * programs + program
    if BY_LENGTH:
        number += (turn & 1) * (programs - 1 - 2 * program)
    return number


@gluon.jit
def turns_of(tiles, turns, program, programs, BY_LENGTH: gl.constexpr):
    """Return the number of a program's tiles: one for each of `turns` full turns, and perhaps
    another."""
    last = tile_number(turns, program, programs, BY_LENGTH)
    return turns + gl.where(last < tiles, 1, 0)


def work_of(
    q_heads: int, group: int, blocks: int, bundles: int, head_group: HeadGroup, programs: int
) -> dict[str, int]:
    """Return `Work` as a kernel's arguments, and `of_group`, the reciprocal of the number of query
    heads per key head."""
    size, numbers = head_group
    head_groups, rest = divmod(bundles, size)
    tiles = head_groups * numbers + rest * blocks
    return {
        "q_heads": q_heads,
        "tiles": tiles,
        "turns": tiles // programs,
        "blocks": blocks,
        "bundles": bundles,
        "head_group": size,
        "group_numbers": numbers,
        "of_q_heads": reciprocal(q_heads),
        "of_group": reciprocal(group),
        "of_head_groups": reciprocal(numbers),
        "of_head_group": reciprocal(size),
        "of_last": reciprocal(rest or size),
    }


@gluon.jit
def place_of(
    tile,
    q_blocks,
    heads,
    head_group,
    group_numbers,
    of_head_groups,
    of_head_group,
    of_last,
    BY_LENGTH: gl.constexpr,
):
    """Return a tile's head, numbered over the whole batch, and the tile's block of queries, which
    is negative for a number without a tile.

    The heads are divided into groups whose keys and values stay in the L2 cache. Within a group,
    the longest blocks of all heads come first, so that no long block runs last.
    """
    number = quotient(tile, of_head_groups)
    first = number * head_group
    within = tile - number * group_numbers
    size = head_group
    of_size = of_head_group
    if first + head_group > heads:
        size = heads - first
        of_size = of_last
    q_block = quotient(within, of_size)
    head = first + within - q_block * size
    if BY_LENGTH:
        q_block = q_blocks - 1 - q_block
    return head, q_block


SHORT = 2048
"""Maximum number of keys for which the start and end of a tile take a large part of its time. Many
small consumers are better for such calls than few large ones, because some consumers compute while
others start or end."""


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
