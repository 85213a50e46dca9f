"""Sharing of a Hopper kernel's last tiles among programs, if there are fewer tiles than programs.

    Osama, Merrill, Cecka, Garland, Owens: "Stream-K: Work-centric Parallel Decomposition for Dense
    Matrix-Matrix Multiplication on the GPU", 2023.

864 tiles are 6.5 turns of 132 programs, so half of the GPU would be idle in a seventh whole turn.
The key blocks of that turn's tiles are therefore concatenated, and each program takes the same
number of blocks: a piece of one tile, or pieces of two. Each program stores the sums of its piece
in memory. The last program to store a piece of a tile adds up the pieces. No program waits for
another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.head_groups import VisibleKeys, blocks_seen
from attention_kernels.hopper.pipeline import meet
from attention_kernels.hopper.scores import ROWS, of_rows

PIECES = gl.constexpr(2)
"""Maximum number of pieces of a program."""
LEAVE = 3.5
"""Time of storing a piece, in µs. The times here are fitted to some twenty calls (H100, head_dim
128).
"""
AT_ONCE = 2.8
"""Additional time in calls of one turn, in µs, because all programs store pieces at the same
time."""
ADD = 2.6
"""Time of adding a piece to the sum of other pieces, in µs."""
WORTH = 0.95
"""Tiles are shared if a shared turn takes less than this fraction of a whole turn's time."""


class TileTimes(NamedTuple):
    """Times of a program on an H100."""

    block: float
    """Time of a block of keys, in µs."""
    tile: float
    """Time of a tile in addition to its blocks, in µs."""


class StreamCut(NamedTuple):
    """Sizes of the pieces of shared tiles, in blocks of keys."""

    row: int
    """Number of blocks reserved for each tile in the concatenation; the tile may have fewer."""
    each: int
    """Number of blocks of each program."""


class ProgramShare(NamedTuple):
    """Numbers from which a program computes its pieces, and the memory for the sums of the
    pieces."""

    row: Any
    """Number of blocks reserved for each tile, as in `StreamCut`."""
    each: Any
    parts: Any
    """Float32 numbers for each program, piece and consumer: (ROWS, Dv) outputs, for each piece of
    Dv in turn, then ROWS references and ROWS sums."""
    arrivals: Any
    """Int32 counters, one per shared tile and consumer, of the pieces that have arrived; zeros
    before and after each launch.
    """


def cut_for(
    visible: VisibleKeys, bundles: int, programs: int, tile_times: TileTimes, slower: float = 1.0
) -> StreamCut | None:
    """Return the way to share the tiles of the last turn if sharing takes less time, else None.

    Tiles of different lengths are shared only if there are several programs for each tile.

    Args:
        bundles: number of bundles of query heads; each has a tile for every block of queries.
        slower: slowdown of a block in a call that shares tiles.
    """
    blocks = blocks_seen(visible)
    whole, rest = divmod(len(blocks) * bundles, programs)
    turn = int(blocks.max()) * tile_times.block + tile_times.tile
    last, cut = last_turn(visible, bundles, programs, tile_times)
    turns = whole + (rest > 0)
    return cut if (whole * turn + last) * slower < turns * turn else None


def last_turn(
    visible: VisibleKeys, bundles: int, programs: int, tile_times: TileTimes
) -> tuple[float, StreamCut | None]:
    """Return the time in µs of the tiles that remain after the full turns, and the way to share
    these tiles, or None.

    Args:
        bundles: as for `cut_for`.
    """
    blocks = blocks_seen(visible)
    tiles, longest = len(blocks) * bundles, int(blocks.max())
    are_equal = visible.left is None and visible.right is None
    shared = tiles % programs if are_equal else tiles
    turn = longest * tile_times.block + tile_times.tile
    if not shared:
        return 0.0, None
    time, cut = min(_cuts(shared, longest, are_equal, programs, tile_times), default=(turn, None))
    if tiles < programs:
        time += AT_ONCE
    return (time, cut) if time < WORTH * turn else (turn, None)


def _cuts(
    shared: int, blocks: int, are_equal: bool, programs: int, tile_times: TileTimes
) -> Iterator[tuple[float, StreamCut]]:
    """Yield ways to cut `shared` tiles of at most `blocks` blocks, each with its time in µs."""
    for pieces in range(2, min(programs // shared, blocks) + 1):
        each = -(-blocks // pieces)
        used = -(-blocks // each)
        time = each * tile_times.block + tile_times.tile + LEAVE + ADD * (used - 1)
        yield time, StreamCut(used * each, each)
    if are_equal:
        each = -(-shared * blocks // programs)
        most = -(-(blocks - 1) // each) + 1
        time = each * tile_times.block + 2 * tile_times.tile + LEAVE + ADD * (most - 1)
        yield time, StreamCut(blocks, each)


def arguments_of(cut: StreamCut | None) -> dict[str, int | None]:
    """Return a kernel's arguments for a cut; without a cut, all are None, including the memory."""
    if cut is None:
        return dict.fromkeys(("parts_ptr", "arrivals_ptr", "share_row", "share_each"))
    return {"share_row": cut.row, "share_each": cut.each}


def memory_for(
    cut: StreamCut | None, programs: int, consumers: int, v_head_dim: int
) -> tuple[int, int] | None:
    """Return the numbers of elements of `ProgramShare.parts` and `.arrivals`; None if nothing is
    shared."""
    if cut is None:
        return None
    counters = programs * consumers  # there are at most as many shared tiles as programs
    return counters * PIECES.value * ROWS.value * (v_head_dim + 2), counters


@gluon.jit
def turns_with_pieces(turns):
    """Return the number of turns of a program, pieces included; the last turn may have no piece."""
    return turns + PIECES


@gluon.jit
def tile_of_piece(turn, turns, share, program, programs):
    """Return the number of the tile of a program's turn; the first `turns` turns have whole
    tiles."""
    number = turn * programs + program
    if turn >= turns:
        number = turns * programs + _shared_of(turn - turns, share, program)
    return number


@gluon.jit
def blocks_of_piece(piece, tiles, share, begin, end, program):
    """Return the range of blocks of a program's piece, within the blocks `begin` to `end` of its
    tile; `tiles` is the number of shared tiles.

    A whole tile has a negative `piece` and keeps all its blocks. If the piece is empty, the
    returned end is not greater than the beginning.
    """
    if piece >= 0:
        shared = _shared_of(piece, share, program)
        own = program * share.each - shared * share.row  # negative if an earlier tile comes first
        piece_end = gl.minimum(end, begin + own + share.each)
        begin += gl.maximum(own, 0)
        end = gl.where(shared < tiles, piece_end, begin)
    return begin, end


@gluon.jit
def programs_of_tile(shared, blocks, share):
    """Return the first and the last program with a piece of a shared tile of `blocks` blocks."""
    first = shared * share.row
    return first // share.each, (first + blocks - 1) // share.each


@gluon.jit
def _shared_of(piece, share, program):
    """Return the number of the shared tile to which a program's piece belongs."""
    return program * share.each // share.row + piece


@gluon.jit
def gather(
    output, reference, total, piece, share, blocks, WHO: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Add up all pieces of a tile of `blocks` blocks for a consumer, if all have arrived.

    Return output (ROWS, Dv), a tuple of one tensor for each piece of Dv, reference (ROWS,) and
    total (ROWS,), and whether all pieces had arrived. If not, another program will add up the
    pieces. For a whole tile, `piece` is negative. Outputs and totals are relative to 2^reference.
    """
    is_whole = True
    if piece >= 0:
        shared = _shared_of(piece, share, gl.program_id(0))
        first, last = programs_of_tile(shared, blocks, share)
        if first < last:
            _leave(output, reference, total, piece, share, WHO, CONSUMERS)
            arrivals = share.arrivals + shared * CONSUMERS + WHO
            before = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
            is_whole = before == last - first
            if is_whole:
                gl.store(arrivals, 0)
                output, reference, total = _add_up(
                    output, reference, total, shared, first, last, share, WHO, CONSUMERS
                )
    return output, reference, total, is_whole


@gluon.jit
def _leave(output, reference, total, piece, share, WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    place = _place(gl.program_id(0), piece, output, share, WHO, CONSUMERS)
    outputs, references, totals = place
    for i in gl.static_range(len(output)):
        gl.store(outputs[i], output[i])
    gl.store(references, gl.convert_layout(reference, references.type.layout))
    gl.store(totals, gl.convert_layout(total, totals.type.layout))
    meet()


@gluon.jit
def _add_up(
    output, reference, total, shared, first, last, share, WHO: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Add up all pieces of a tile, which the programs `first` to `last` have stored.

    The program's own piece is read again, so that the order and the result are the same in every
    program. The values passed in are not used, but their registers are reused for the sums. With
    other registers, the compiler (`ptxas`) produced 40 more instructions in the loop over the keys.
    """
    ROW: gl.constexpr = reference.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, output[0].type.layout)
    reference = gl.convert_layout(reference, OF_ROW)
    total = gl.convert_layout(total, OF_ROW)
    for program in range(first, last + 1):
        if program == first:
            reference = gl.full_like(reference, float("-inf"))
        piece = shared - _shared_of(0, share, program)
        outputs, references, totals = _place(program, piece, output, share, WHO, CONSUMERS)
        other = gl.load(references)
        highest = gl.maximum(reference, other)
        origin = gl.where(highest == float("-inf"), 0.0, highest)
        shrink = gl.exp2(reference - origin)
        factor = gl.exp2(other - origin)
        added = output[:0]
        for i in gl.static_range(len(output)):
            before = gl.where(program == first, 0.0, output[i] * of_rows(shrink, output[i]))
            added += (before + gl.load(outputs[i]) * of_rows(factor, output[i]),)
        output = added
        total = gl.where(program == first, 0.0, total * shrink) + gl.load(totals) * factor
        reference = highest
    return output, gl.convert_layout(reference, ROW), gl.convert_layout(total, ROW)


@gluon.jit
def _place(program, piece, output, share, WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return pointers to a piece's outputs, references and sums."""
    DV: gl.constexpr = columns_of(output)
    slot = (program * PIECES + piece) * CONSUMERS + WHO
    base = share.parts + slot.to(gl.int64) * (ROWS * (DV + 2))
    outputs = output[:0]
    for i in gl.static_range(len(output)):
        outputs += (_rows_from(base, output[i]),)
        base += ROWS * output[i].shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, output[0].type.layout))
    return outputs, base + rows, base + ROWS + rows


@gluon.jit
def _rows_from(base, like):
    """Return pointers to a block with the shape and layout of `like` that begins at `base`."""
    COLUMNS: gl.constexpr = like.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, like.type.layout))
    return base + rows[:, None] * COLUMNS + columns[None, :]


@constexpr_function
def columns_of(output):
    return sum(piece.shape[1] for piece in output)
