"""Sizes of the work in `split_kv_kernel.py`: keys at a time, warps, and parts of the keys."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from attention_kernels.decode.kv_cache import Access
from attention_kernels.decode.split_kv_assignment import KeyAssignment

SHORTEST = 128
"""Least keys for which a program is worth its start."""
LONG = 4096
"""Least keys of a program for which two programs on a processor look up tokens faster than one."""
RESIDENT = 2
"""Programs that a processor holds at once in most tilings, and that keep its memory busy."""
MOST_SHARES = 8
"""Most parts a processor that keys are cut into: more end more evenly, and start more often."""
LEAST_SHARE = 2**21
"""Bytes of keys and values beside which a program's start and end, some 2 µs, are short."""
WORTH_DEALING = 2**26
"""Least bytes of keys and values, some 15 µs of an H200, for which uneven lengths may cost more
than adding the lengths up."""
MOST_SEQUENCES = 1024
"""Most lengths that a program can read and add up at once."""
MERGED_REGISTERS = 32
"""Numbers that a thread reads at once when its program merges parts."""
MERGED_OUTPUT = 2**14
"""Numbers of the output that a single program merges at once."""
ALONE = 2**12
"""Numbers of the output that one program merges about as fast as several do."""
FEW_PARTS = 2
"""Number of parts that one program merges about as fast as several do."""


class Tiles(NamedTuple):
    """Sizes for calls of at most so many rows, and numbers of a key or value."""

    rows: int
    """Rows of a program, padded."""
    widest: int
    block_n: int
    warps: int
    stages: int


# Of each access the first entry that is large enough is used; "pages" is for described ones. With
# 128 keys and a head_dim of 128, an 8-bit cache has 32 KiB in a block: a processor has room for two
# programs of three blocks, or of two blocks beside the weights of 32 rows. The wide output of MLA
# with more than 16 heads needs the registers of 8 warps.
TILES: dict[Access | Literal["pages"], tuple[Tiles, ...]] = {
    "quantised": (
        Tiles(32, 64, 128, 4, 4),
        Tiles(16, 128, 128, 4, 3),
        Tiles(32, 128, 128, 4, 2),
        Tiles(16, 256, 64, 4, 3),
        Tiles(32, 512, 64, 8, 3),
    ),
    "described": (
        Tiles(64, 64, 128, 4, 4),
        Tiles(16, 128, 128, 4, 3),
        Tiles(32, 128, 128, 4, 2),
        Tiles(64, 128, 128, 4, 3),
        Tiles(64, 256, 32, 4, 4),
        Tiles(16, 512, 64, 8, 3),
        Tiles(64, 512, 64, 8, 2),
    ),
    "pages": (
        Tiles(64, 64, 128, 4, 4),
        Tiles(64, 128, 64, 4, 4),
        Tiles(64, 256, 32, 4, 4),
        Tiles(16, 512, 64, 8, 3),
        Tiles(64, 512, 64, 8, 2),
    ),
    "indirect": (
        Tiles(64, 64, 128, 4, 4),
        Tiles(64, 128, 64, 4, 5),
        Tiles(64, 256, 32, 4, 5),
        Tiles(16, 512, 32, 4, 5),
        Tiles(64, 512, 32, 8, 5),
    ),
    "direct": (
        Tiles(64, 64, 128, 4, 3),
        Tiles(64, 128, 64, 4, 4),
        Tiles(64, 256, 32, 4, 4),
        Tiles(16, 512, 32, 4, 4),
        Tiles(64, 512, 32, 8, 4),
    ),
}


class Tiling(NamedTuple):
    """Sizes and parts of the work."""

    block_n: int
    """Number of keys in a block."""
    warps: int
    stages: int
    splits: int
    """Equal parts that the keys of each head are cut into, where there is no assignment."""
    assignment: KeyAssignment | None = None
    """Assignment of keys to programs by the sequences' lengths."""


class Plan(NamedTuple):
    """Sizes that follow from those of a call alone."""

    tiling: Tiling
    row_blocks: int
    block_m: int
    """Rows of a program, padded to a tensor core's tile."""
    block_d: int
    block_tail: int
    """Columns of the key's tail; 0 where key and value are separate."""
    block_dv: int


class Merging(NamedTuple):
    """Way in which the parts of an output are merged."""

    block_rows: int
    """Rows that are merged at once, without padding; `row_chunks` of them are all rows of a
    program."""
    row_chunks: int
    block_splits: int
    """Number of parts that are read at a time."""
    together: bool
    """True where all programs of a head merge, once they have arrived."""


def merging(cut: Plan, tiling: Tiling, heads: int, rows: int, processors: int) -> Merging:
    """Return how to merge, for a `plan` of these sizes whose tiling may be another one.

    Programs wait for each other only where all of them run at once. Otherwise waiting programs
    would keep others from starting.
    """
    programs = (
        heads * tiling.splits if tiling.assignment is None else tiling.assignment.programs(heads)
    )
    parts = programs // heads
    merged_rows = _stored(rows, cut.block_m)
    runs_at_once = programs * cut.row_blocks <= processors
    together = runs_at_once and parts > FEW_PARTS and merged_rows * cut.block_dv > ALONE
    block_rows = min(merged_rows, MERGED_OUTPUT // cut.block_dv)
    if together:
        block_rows = max(1, merged_rows >> (parts - 1).bit_length())
    elements = MERGED_REGISTERS * 32 * tiling.warps
    block_splits = max(1, min(elements // (block_rows * cut.block_dv), 16))
    return Merging(block_rows, merged_rows // block_rows, block_splits, together)


@functools.lru_cache(maxsize=1024)
def plan(
    heads: int,
    rows: int,
    positions: int,
    head_dim: int,
    v_dim: int,
    access: Access,
    processors: int,
    tail: int = 0,
    sequences: int = 1,
    largest_block: int | None = None,
) -> Plan:
    """Return sizes for a call, a deterministic choice from measurements on an H200.

    Args:
        heads: B · Hkv.
        rows: G · Sq.
        positions: number of keys to attend to.
        access: how they are read.
        processors: streaming multiprocessors of the GPU.
        tail: numbers of a key that follow its value, where that is the key's first part.
        sequences: B where each has a length of its own, at most `positions`, which the GPU alone
            knows; else 1.
        largest_block: most keys that descriptors load at once.
    """
    # In 8 bits a row is two columns of a product (`high_low_parts.py`): 32 rows fill its registers.
    least, most = (8, 32) if access == "quantised" else (16, 64)
    block_m = min(max(least, 1 << (rows - 1).bit_length()), most)
    row_blocks = -(-rows // block_m)
    block_dv = _side(v_dim)
    block_d, block_tail = (block_dv, _side(tail)) if tail else (_side(head_dim), 0)
    if access == "quantised":
        block_d = max(block_d, 32)  # bytes that a tensor core sums at once
    widest = max(block_d, block_dv)
    in_blocks = access == "described" and largest_block is not None
    _, _, block_n, warps, stages = next(
        tiles
        for tiles in TILES["pages" if in_blocks else access]
        if block_m <= tiles.rows and widest <= tiles.widest
    )
    if largest_block is not None and access == "described":
        block_n = min(block_n, largest_block)
    # One program a processor moves as many bytes as several do, unless it has to look up where long
    # sequences are.
    splits = processors // (heads * row_blocks)
    if access == "indirect" and positions > splits * LONG:
        splits *= 2
    # With half as many bytes or twice as many rows, two programs a processor hide each other's
    # waiting.
    if access == "quantised" or (block_m == 32 and widest <= 128):
        splits *= 2
    # Loading takes as long as bytes / splits and merging as bytes · splits: the sum is least where
    # both take as long. A program loads about twice as fast as it merges. Where all run at once,
    # each row of a large output may have a program that merges it.
    itemsize = 1 if access == "quantised" else 2
    loaded = positions * (block_d + (block_tail or block_dv)) * itemsize
    stored_rows = _stored(rows, block_m)
    merged = stored_rows * block_dv * 4
    most = math.isqrt(loaded // (2 * merged))
    if stored_rows * block_dv > ALONE:
        at_once = processors // (heads * row_blocks)
        most = max(most, min(at_once, math.isqrt(stored_rows * loaded // (2 * merged))))
    splits = max(1, min(splits, most, -(-positions // SHORTEST)))
    assignment = None
    if 1 < sequences <= MOST_SEQUENCES and heads * loaded >= WORTH_DEALING:
        a_block = block_n * loaded // positions
        resident = max(1, RESIDENT * processors // row_blocks)
        shares = min(MOST_SHARES * processors // row_blocks, heads * loaded // LEAST_SHARE)
        if access == "described" and widest > 256:
            # A processor has room for one program. Equal sequences have up to one part more each,
            # and then none is left for another turn. Parts of 512 numbers a row take long to merge,
            # so there is one turn more than the heads fill: with 64 heads 108 % of the floor, 109
            # with the first turn alone, 98 with eight.
            turn = max(1, processors // row_blocks)
            resident = max(1, turn - heads)
            shares = max(1, min(-(-heads // turn) + 1, shares // turn)) * turn - heads
        assignment = KeyAssignment(
            max(resident, shares), resident, -(-LEAST_SHARE // a_block), a_block / (2 * merged)
        )
    # Where nothing is merged, more warps hide more latency of a small block's loads.
    is_merged = splits > 1 or assignment is not None
    if widest <= 64 and not is_merged and access == "direct":
        warps = 8
    return Plan(
        Tiling(block_n, warps, stages, splits, assignment),
        row_blocks,
        block_m,
        block_d,
        block_tail,
        block_dv,
    )


def _stored(rows: int, most: int) -> int:
    """Return the rows that a program of `most` stores, a power of two without the padding of its
    tile."""
    return min(1 << (rows - 1).bit_length(), most)


def _side(numbers: int) -> int:
    """Return a power of two that a tensor core's product can have as a side."""
    return max(16, 1 << (numbers - 1).bit_length())
