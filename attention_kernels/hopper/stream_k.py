"""Sharing of the last tiles of a Hopper kernel among programs, where there is not one for each.

    Osama, Merrill, Cecka, Garland, Owens: "Stream-K: Work-centric Parallel Decomposition for Dense
    Matrix-Matrix Multiplication on the GPU", 2023.

864 tiles are 6.5 turns of 132 programs: in a seventh whole turn, half of the GPU would be idle. So
the keys of that turn's tiles lie in a row, block after block, and each program takes as many of
them: a piece of one tile, or of two. It leaves the sums of its piece in memory. The last program to
leave a piece of a tile adds the pieces up. No program waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention_kernels.hopper.head_groups import VisibleKeys, blocks_seen
from attention_kernels.hopper.pipeline import meet
from attention_kernels.hopper.scores import ROWS

PIECES = gl.constexpr(2)
"""Most pieces that a program has."""
LEAVE = 3.5
"""µs that leaving a piece takes. These numbers are fits to some twenty calls (H100, head_dim 128).
"""
AT_ONCE = 2.8
"""Additional µs in calls of one turn, where all programs leave pieces at the same time."""
ADD = 2.6
"""µs that adding a piece to the others takes."""
WORTH = 0.95
"""Time of a shared turn, relative to one of whole tiles, below which tiles are shared."""


class TileTimes(NamedTuple):
    """µs that a program takes on an H100."""

    block: float
    """µs for a block of keys."""
    tile: float
    """µs for a tile, beside its blocks."""


class StreamCut(NamedTuple):
    """Sizes that shared tiles are cut into, in blocks of keys."""

    row: int
    """Blocks of a tile's place in the row of all; the tile may have fewer."""
    each: int
    """Blocks of each program."""


class ProgramShare(NamedTuple):
    """Numbers by which a program finds its pieces, and the memory where it leaves their sums."""

    row: Any
    """Blocks of a tile, as in `StreamCut`."""
    each: Any
    parts: Any
    """Float32: for each program, piece and consumer (ROWS, Dv) outputs, ROWS references and ROWS
    sums."""
    arrivals: Any
    """Int32, how many pieces of each shared tile and consumer have arrived; zeros before and after.
    """


def cut_for(
    visible: VisibleKeys, bundles: int, programs: int, tile_times: TileTimes, slower: float = 1.0
) -> StreamCut | None:
    """Return how the tiles of a last turn are shared, if that takes less time, else None.

    Tiles of different lengths are shared only where they are so few that each has several programs
    of its own.

    Args:
        bundles: of query heads; each has a tile for every block of queries.
        slower: factor of a block's time in a program that has pieces.
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
    """Return the µs of the tiles that are left after whole turns, and how they are shared then.

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
    """Yield ways to cut so many tiles of up to so many blocks, and the µs that each takes."""
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
    """Return a kernel's arguments for a cut; without one, also None for the memory."""
    if cut is None:
        return dict.fromkeys(("parts_ptr", "arrivals_ptr", "share_row", "share_each"))
    return {"share_row": cut.row, "share_each": cut.each}


def memory_for(
    cut: StreamCut | None, programs: int, consumers: int, v_head_dim: int
) -> tuple[int, int] | None:
    """Return the sizes of `ProgramShare.parts` and `.arrivals` in numbers; None where nothing is
    shared."""
    if cut is None:
        return None
    counters = programs * consumers  # there are at most as many tiles as programs
    return counters * PIECES.value * ROWS.value * (v_head_dim + 2), counters


@gluon.jit
def turns_with_pieces(turns):
    """Return how many turns a program has, with those of pieces; the last may have no piece."""
    return turns + PIECES


@gluon.jit
def tile_of_piece(turn, turns, share, program, programs):
    """Return the number of the tile that a program's turn is for; the first `turns` are whole
    tiles."""
    number = turn * programs + program
    if turn >= turns:
        number = turns * programs + _shared_of(turn - turns, share, program)
    return number


@gluon.jit
def blocks_of_piece(piece, tiles, share, begin, end, program):
    """Return the blocks of a tile, of `begin` to `end`, that a program's piece has, with so many
    shared tiles.

    A whole tile, whose number of a piece is negative, has all. Where there are none, the second
    number is not greater than the first.
    """
    if piece >= 0:
        shared = _shared_of(piece, share, program)
        own = program * share.each - shared * share.row  # may have begun in the tile before
        piece_end = gl.minimum(end, begin + own + share.each)
        begin += gl.maximum(own, 0)
        end = gl.where(shared < tiles, piece_end, begin)
    return begin, end


@gluon.jit
def programs_of_tile(shared, blocks, share):
    """Return the first and the last program that has a piece of a shared tile of so many blocks."""
    first = shared * share.row
    return first // share.each, (first + blocks - 1) // share.each


@gluon.jit
def _shared_of(piece, share, program):
    """Return the shared tile that a program's piece belongs to."""
    return program * share.each // share.row + piece


@gluon.jit
def gather(
    output, reference, total, piece, share, blocks, WHO: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Add all pieces of a tile of so many blocks to a consumer's, (ROWS, Dv), (ROWS,) and (ROWS,),
    if they have arrived.

    Return the sums and whether all were there. If not, another program is going to add them up. The
    number of a piece that is a whole tile is negative. Outputs and sums are relative to
    2^reference.
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
    gl.store(outputs, output)
    gl.store(references, gl.convert_layout(reference, references.type.layout))
    gl.store(totals, gl.convert_layout(total, totals.type.layout))
    meet()


@gluon.jit
def _add_up(
    output,
    reference,
    total,
    shared,
    first,
    last,
    share,
    WHO: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Add up all pieces of a tile, which the programs from the first to the last have left.

    The program's own piece is read again: in this order, any program that adds them up gets the
    same bits. The numbers passed in are not used, but their registers are. With others for the
    sums, the compiler (`ptxas`) had 40 more instructions in the loop over the keys.
    """
    ROW: gl.constexpr = reference.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, output.type.layout)
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
        before = gl.where(program == first, 0.0, output * shrink[:, None])
        output = before + gl.load(outputs) * factor[:, None]
        total = gl.where(program == first, 0.0, total * shrink) + gl.load(totals) * factor
        reference = highest
    return output, gl.convert_layout(reference, ROW), gl.convert_layout(total, ROW)


@gluon.jit
def _place(program, piece, output, share, WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return pointers to a piece's outputs, references and sums."""
    ROWS: gl.constexpr = output.shape[0]
    DV: gl.constexpr = output.shape[1]
    LAYOUT: gl.constexpr = output.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    slot = (program * PIECES + piece) * CONSUMERS + WHO
    base = share.parts + slot.to(gl.int64) * (ROWS * (DV + 2))
    outputs = base + rows[:, None] * DV + columns[None, :]
    return outputs, base + ROWS * DV + rows, base + ROWS * (DV + 1) + rows
