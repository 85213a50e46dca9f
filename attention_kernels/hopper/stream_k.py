"""How the programs of a Hopper kernel share the keys of tiles of which there is not one for each.

    Osama, Merrill, Cecka, Garland, Owens: "Stream-K: Work-centric Parallel Decomposition for Dense
    Matrix-Matrix Multiplication on the GPU", 2023.

864 tiles are 6.5 turns of 132 programs: in a seventh whole one, half of the GPU would be idle. So
the keys of that turn's tiles lie in a row, block after block, and each program takes as many of
them: a piece of one tile, or of two. It leaves in memory what its piece gives, and whoever is the
last to leave a piece of a tile adds them up. Nobody waits for anybody.
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
"""That a program has at most."""
LEAVE = 3.5
"""µs that leaving a piece takes. These are fits to some twenty calls (H100, head_dim 128)."""
AT_ONCE = 2.8
"""How much more it takes in calls of one turn, where all programs leave pieces at the same time."""
ADD = 2.6
"""µs that adding a piece to the others takes."""
WORTH = 0.95
"""Time of a shared turn, relative to one of whole tiles, below which tiles are shared."""


class TileTimes(NamedTuple):
    """µs that a program takes on an H100."""

    block: float
    """For a block of keys."""
    tile: float
    """For a tile, beside its blocks."""


class StreamCut(NamedTuple):
    """How shared tiles are cut, in blocks of keys."""

    row: int
    """Of a tile, in the row of all; it may have fewer itself."""
    each: int
    """Of a program."""


class ProgramShare(NamedTuple):
    """Numbers by which a program finds its pieces, and where it leaves what they give."""

    row: Any
    """As in `StreamCut`."""
    each: Any
    parts: Any
    """Float32: for each program, piece and consumer (ROWS, Dv) outputs, ROWS references and ROWS
    sums."""
    arrivals: Any
    """Int32, how many pieces of each shared tile and consumer are there; zeros before and after."""


def cut_for(
    visible: VisibleKeys, bundles: int, programs: int, tile_times: TileTimes, slower: float = 1.0
) -> StreamCut | None:
    """How the tiles of a last turn are shared, if a call takes less time then.

    Tiles of different lengths are shared only where they are so few that each has several programs
    of its own.

    Args:
        bundles: of query heads; each has a tile for every block of queries.
        slower: how much longer a block takes in a program that knows of pieces.
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
    """How long what is left after whole turns takes, in µs, and how its tiles are shared then.

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
    """Ways to cut so many tiles of up to so many blocks, and how many µs each takes."""
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
    """What a kernel is told of it; without one, also that no memory is given."""
    if cut is None:
        return dict.fromkeys(("parts_ptr", "arrivals_ptr", "share_row", "share_each"))
    return {"share_row": cut.row, "share_each": cut.each}


def memory_for(
    cut: StreamCut | None, programs: int, consumers: int, v_head_dim: int
) -> tuple[int, int] | None:
    """How many numbers `ProgramShare.parts` and `ProgramShare.arrivals` have; None where nothing is
    shared."""
    if cut is None:
        return None
    counters = programs * consumers  # of no more tiles than programs
    return counters * PIECES.value * ROWS.value * (v_head_dim + 2), counters


@gluon.jit
def turns_with_pieces(turns):
    """How many turns a program has behind those of whole tiles; there may be no piece in the
    last."""
    return turns + PIECES


@gluon.jit
def tile_of_piece(turn, turns, share, program, programs):
    """The number of the tile that a program's turn is for; the first `turns` are whole tiles."""
    number = turn * programs + program
    if turn >= turns:
        number = turns * programs + _shared_of(turn - turns, share, program)
    return number


@gluon.jit
def blocks_of_piece(piece, tiles, share, begin, end, program):
    """Those of a tile's blocks of keys, which are `begin` to `end`, that a program's piece is of,
    where so many tiles are shared: all, of a whole tile, whose number of a piece is negative. Where
    there are none the second number is not the greater."""
    if piece >= 0:
        shared = _shared_of(piece, share, program)
        own = program * share.each - shared * share.row  # may have begun in the tile before
        piece_end = gl.minimum(end, begin + own + share.each)
        begin += gl.maximum(own, 0)
        end = gl.where(shared < tiles, piece_end, begin)
    return begin, end


@gluon.jit
def programs_of_tile(shared, blocks, share):
    """The first program that has a piece of a shared tile of so many blocks, and the last."""
    first = shared * share.row
    return first // share.each, (first + blocks - 1) // share.each


@gluon.jit
def _shared_of(piece, share, program):
    """Which of the shared tiles a program's piece is of."""
    return program * share.each // share.row + piece


@gluon.jit
def gather(
    output, reference, total, piece, share, blocks, WHO: gl.constexpr, CONSUMERS: gl.constexpr
):
    """What a consumer's piece gave, (ROWS, Dv), (ROWS,) and (ROWS,), with all other pieces of the
    tile, which has so many blocks of keys; and whether they are there. If not, somebody else is
    going to add them up. The number of a piece that is a whole tile is negative.

    Outputs and sums are relative to 2^reference.
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
    """All pieces of a tile, which the first program to the last have left. One's own is read again:
    in this order, whoever adds them up gets the same bits.

    The numbers given are not used, but their registers are: with others for the sums, the compiler
    (`ptxas`) had 40 more instructions in the loop over the keys.
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
    """Pointers to a piece's outputs, references and sums."""
    ROWS: gl.constexpr = output.shape[0]
    DV: gl.constexpr = output.shape[1]
    LAYOUT: gl.constexpr = output.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    slot = (program * PIECES + piece) * CONSUMERS + WHO
    base = share.parts + slot.to(gl.int64) * (ROWS * (DV + 2))
    outputs = base + rows[:, None] * DV + columns[None, :]
    return outputs, base + ROWS * DV + rows, base + ROWS * (DV + 1) + rows
