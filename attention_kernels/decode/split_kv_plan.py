"""Sizes of the work in `split_kv_kernel.py`: block sizes, warps, and the split of the keys."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from attention_kernels.decode.kv_cache import Access
from attention_kernels.decode.split_kv_assignment import KeyAssignment

SHORTEST = 128
"""Minimum number of keys for which starting a program is worthwhile."""
LONG = 4096
"""Minimum number of keys per program for which two programs on a multiprocessor look up tokens
faster than one."""
MOST_SHARES = 8
"""Maximum number of parts per multiprocessor. More parts balance the work better, but start more
programs."""
LEAST_SHARE = 2**21
"""Minimum size of a part in bytes of keys and values, so that a program's start and end (some 2 µs)
are short in comparison."""
WORTH_DEALING = 2**26
"""Minimum size of keys and values in bytes (some 15 µs on an H200) for which uneven lengths may
cost more than adding up the lengths."""
LEAST_PART = 512
"""Minimum number of keys in a part if parts do not depend on the batch."""
PROGRAMS_OF_SEQUENCE = 128
"""Maximum number of programs for a sequence then: one for each multiprocessor of a large GPU."""
ANY_NUMBER = 2**30
"""More parts than any sequence has."""
WORTH_OF_PART = 64
"""Minimum ratio of the bytes of such a part's keys and values to the bytes of its sums."""
MOST_SEQUENCES = 1024
"""Maximum number of lengths that a program can read and add up at once."""
MERGED_REGISTERS = 32
"""Number of elements that a thread reads at once when its program merges parts."""
MERGED_OUTPUT = 2**14
"""Number of output elements that a single program merges at once."""
ALONE = 2**12
"""Number of output elements that one program merges about as fast as several do."""
FEW_PARTS = 2
"""Number of parts that one program merges about as fast as several do."""


class Tiles(NamedTuple):
    """Sizes for calls with at most a given number of rows and a given head dimension."""

    rows: int
    """Number of rows of a program, including padding."""
    widest: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    """Maximum number of registers of a thread; None for the compiler's choice."""
    resident: int = 2
    """Number of programs that a multiprocessor has room for."""


# The first entry of an access that is large enough is used; "pages" is for pages that are read
# through descriptors. With 128 keys and a head_dim of 128, a block of an 8-bit cache takes 32 KiB:
# a multiprocessor has room for two programs of three blocks, or for two programs of two blocks and
# the weights of 32 rows. The wide output of MLA with more than 16 heads needs the registers of 8
# warps. An FP8 block has half the bytes but takes as long from its load to its end, so blocks are
# larger, or more programs are resident.
TILES: dict[Access | Literal["pages", "fp8"], tuple[Tiles, ...]] = {
    "fp8": (
        Tiles(16, 64, 128, 4, 3, registers=128, resident=3),
        Tiles(16, 128, 256, 4, 2),
        Tiles(64, 64, 128, 4, 3),
        Tiles(64, 128, 64, 4, 3),
        Tiles(64, 256, 64, 8, 3),
        Tiles(16, 512, 64, 8, 2, registers=128),
        Tiles(32, 512, 64, 8, 2, resident=1),
    ),
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
    """Number of equal parts that the keys of each head are split into, if there is no
    assignment."""
    assignment: KeyAssignment | None = None
    """Assignment of keys to programs by the lengths of the sequences."""
    part: int = 0
    """Minimum number of keys in each part but a sequence's last, if the parts depend on nothing but
    the sequence; 0 for equal parts. `splits` is then the largest number of parts of a sequence."""
    most_parts: int = 0
    """Maximum number of such parts: those of a long sequence are longer."""
    registers: int | None = None
    """Maximum number of registers of a thread; None for the compiler's choice."""


class Plan(NamedTuple):
    """Sizes that depend only on the sizes of a call."""

    tiling: Tiling
    row_blocks: int
    block_m: int
    """Number of rows of a program, padded to a tile of the tensor cores."""
    block_d: int
    block_tail: int
    """Number of columns of the key's tail; 0 if key and value are separate."""
    block_dv: int


class Merging(NamedTuple):
    """Sizes with which the parts of an output are merged."""

    block_rows: int
    """Number of rows that are merged at once, not counting padding. A program merges `row_chunks`
    times as many rows."""
    row_chunks: int
    block_splits: int
    """Number of parts that are read at a time."""
    together: bool
    """True if all programs of a head merge rows after all have arrived."""


def merging(cut: Plan, tiling: Tiling, heads: int, rows: int, processors: int) -> Merging:
    """Return how to merge for the sizes of a `plan`; `tiling` may differ from the plan's own.

    Programs wait for each other only if all of them run at once. Otherwise waiting programs would
    keep others from starting.
    """
    programs = (
        heads * tiling.splits if tiling.assignment is None else tiling.assignment.programs(heads)
    )
    parts = programs // heads
    merged_rows = _stored(rows, cut.block_m)
    runs_at_once = programs * cut.row_blocks <= processors and not tiling.part
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
    most_parts: int = 0,
    itemsize: int = 2,
) -> Plan:
    """Return sizes for a call, chosen deterministically from measurements on an H200.

    Args:
        heads: B · Hkv.
        rows: G · Sq.
        positions: number of keys to attend to.
        access: way in which the keys are read.
        processors: number of streaming multiprocessors of the GPU.
        tail: number of elements of a key after its value, if the value is the first part of the
            key.
        sequences: B if only the GPU knows the sequences' lengths, which are at most `positions`;
            else 1.
        largest_block: maximum number of keys that a descriptor loads at once.
        most_parts: maximum number of parts of a sequence if the order of its sums must not depend
            on `heads`, `positions`, `processors` and `sequences`; else 0.
        itemsize: size of an element of the cache in bytes.
    """
    is_fp8 = itemsize == 1 and access != "quantised"
    block_dv = _side(v_dim)
    block_d, block_tail = (block_dv, _side(tail)) if tail else (_side(head_dim), 0)
    if access == "quantised":
        block_d = max(block_d, 32)  # number of bytes that a tensor core sums at once
    widest = max(block_d, block_dv)
    # In 8 bits a row is two columns of a product (`high_low_parts.py`); 32 rows fill the registers.
    # In FP8, as many rows of MLA do.
    least, most = (8, 32) if access == "quantised" else (16, 64)
    if is_fp8 and widest > 256:
        most = 32
    block_m = min(max(least, 1 << (rows - 1).bit_length()), most)
    row_blocks = -(-rows // block_m)
    in_blocks = access == "described" and largest_block is not None
    sizes = TILES["fp8" if is_fp8 else "pages" if in_blocks else access]
    tiles = next(each for each in sizes if block_m <= each.rows and widest <= each.widest)
    block_n, warps = tiles.block_n, tiles.warps
    if largest_block is not None and access == "described":
        block_n = min(block_n, largest_block)
    # One program per multiprocessor moves as many bytes as several do, unless the program has to
    # look up the tokens of long sequences, or the bytes are few for the time of a block.
    splits = processors * (tiles.resident if is_fp8 else 1) // (heads * row_blocks)
    if access == "indirect" and not is_fp8 and positions > splits * LONG:
        splits *= 2
    # With half as many bytes or twice as many rows, two programs per multiprocessor hide each
    # other's latency.
    if access == "quantised" or (block_m == 32 and widest <= 128 and not is_fp8):
        splits *= 2
    # The time of loading is proportional to bytes / splits, that of merging to bytes · splits. The
    # sum is smallest if the two times are equal. A program loads about twice as fast as it merges.
    # If all programs run at once, each row of a large output may have its own program that merges
    # it.
    loaded = positions * (block_d + (block_tail or block_dv)) * itemsize
    stored_rows = _stored(rows, block_m)
    merged = stored_rows * block_dv * 4
    most = math.isqrt(loaded // (2 * merged))
    if stored_rows * block_dv > ALONE:
        at_once = processors // (heads * row_blocks)
        most = max(most, min(at_once, math.isqrt(stored_rows * loaded // (2 * merged))))
    splits = max(1, min(splits, most, -(-positions // SHORTEST)))
    assignment, part = None, 0
    if most_parts:
        bytes_of_key = (block_d + (block_tail or block_dv)) * itemsize
        part = max(LEAST_PART, _side(-(-WORTH_OF_PART * merged // bytes_of_key)))
        splits = max(1, min(most_parts, -(-positions // part)))
    elif 1 < sequences <= MOST_SEQUENCES and heads * loaded >= WORTH_DEALING:
        a_block = block_n * loaded // positions
        resident = max(1, tiles.resident * processors // row_blocks)
        shares = min(MOST_SHARES * processors // row_blocks, heads * loaded // LEAST_SHARE)
        if access == "described" and widest > 256:
            # A multiprocessor has room for one program in 16 bits. Equal sequences have up to one
            # extra part each, for which `resident` leaves room in the turn. Merging parts of 512
            # numbers per row takes long, so there is only one turn more than the heads fill: 108 %
            # of the floor with 64 heads, compared with 109 % with only the first turn and 98 % with
            # eight turns.
            turn = max(1, processors * (tiles.resident if is_fp8 else 1) // row_blocks)
            resident = max(1, turn - heads)
            shares = max(1, min(-(-heads // turn) + 1, shares // turn)) * turn - heads
        assignment = KeyAssignment(
            max(resident, shares), resident, -(-LEAST_SHARE // a_block), a_block / (2 * merged)
        )
    # If nothing is merged, more warps hide more of the latency of a small block's loads.
    is_merged = splits > 1 or assignment is not None or part > 0
    if widest <= 64 and not is_merged and access == "direct":
        warps = 8
    return Plan(
        Tiling(block_n, warps, tiles.stages, splits, assignment, part, most_parts, tiles.registers),
        row_blocks,
        block_m,
        block_d,
        block_tail,
        block_dv,
    )


def invariant_parts(kv_heads: int, has_mask: bool) -> int:
    """Return the maximum number of parts of a sequence in an invariant call.

    A mask may hide the keys after a sequence's own. Its parts then have a fixed number of keys,
    because only the mask tells how long the sequence is.
    """
    return ANY_NUMBER if has_mask else max(1, PROGRAMS_OF_SEQUENCE // kv_heads)


def _stored(rows: int, most: int) -> int:
    """Return the number of rows, at most `most`, that a program stores: a power of two without the
    padding of its tile."""
    return min(1 << (rows - 1).bit_length(), most)


def _side(numbers: int) -> int:
    """Return the smallest power of two, at least 16, that holds `numbers`: a valid size for the
    tensor cores."""
    return max(16, 1 << (numbers - 1).bit_length())
