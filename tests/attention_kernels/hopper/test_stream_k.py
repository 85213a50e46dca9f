"""Programs that share tiles compute every block of keys once, checked as plain arithmetic."""

from collections import Counter, defaultdict

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import stream_k
from attention_kernels.hopper.head_groups import VisibleKeys
from attention_kernels.hopper.stream_k import ProgramShare, StreamCut, TileTimes

PROGRAMS = 132
PACE = TileTimes(1.4, 2.8)
FLUX = 36 * 24
"""Number of tiles of 128 queries in a call of Flux, with 4,608 tokens and 24 heads."""

tile_of_piece, blocks_of_piece = stream_k.tile_of_piece.fn, stream_k.blocks_of_piece.fn
programs_of_tile, turns_with_pieces = (stream_k.programs_of_tile.fn, stream_k.turns_with_pieces.fn)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the functions that find a piece plain Python."""
    monkeypatch.setattr(stream_k, "_shared_of", stream_k._shared_of.fn)
    for name, plain in (
        ("minimum", min),
        ("maximum", max),
        ("where", lambda which, yes, no: yes if which else no),
    ):
        monkeypatch.setattr(stream_k.gl, name, plain)


def cut_for(tiles: int, blocks: int, are_equal: bool) -> StreamCut | None:
    """Return how `tiles` tiles of at most `blocks` blocks are shared, or None if they are not."""
    right = None if are_equal else blocks * 128
    visible = VisibleKeys(128, blocks * 128, 0, None, right, queries=128, keys=128)
    return stream_k.cut_for(visible, tiles, PROGRAMS, PACE)


def pieces_of(
    lengths: list[int], cut: StreamCut, begin: int = 0
) -> dict[int, list[tuple[int, int, int, int]]]:
    """Return the pieces of each tile as (program, number of its piece, first block, end).

    Tile number i has `lengths[i]` blocks, and `begin` is the number of the first block.
    """
    tiles, share = len(lengths), ProgramShare(*cut, None, None)
    turns = tiles // PROGRAMS
    pieces = defaultdict(list)
    for program in range(PROGRAMS):
        for turn in range(int(turns_with_pieces(turns))):
            tile = tile_of_piece(turn, turns, share, program, PROGRAMS)
            blocks = lengths[tile] if tile < tiles else 1
            first, end = blocks_of_piece(
                turn - turns, tiles % PROGRAMS, share, begin, begin + blocks, program
            )
            if first < end:
                pieces[tile].append((program, turn - turns, first, end))
    return pieces


CALLS = [
    (FLUX, 36, True),
    (12 * 24, 12, True),
    (12 * 36, 36, True),
    (13 * 132 + 1, 64, True),
    (132 + 117, 512, True),
    (1, 64, True),
    (32, 32, True),
    (100, 200, True),
    (16, 64, False),
    (7, 300, False),
    (66, 40, False),
]


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize(("tiles", "blocks", "are_equal"), CALLS)
def test_each_block_is_in_one_piece(tiles: int, blocks: int, are_equal: bool, begin: int) -> None:
    cut = cut_for(tiles, blocks, are_equal)
    lengths = [blocks if are_equal else 1 + tile * 7919 % blocks for tile in range(tiles)]
    found = pieces_of(lengths, cut, begin)
    assert sorted(found) == list(range(tiles))
    whole = tiles // PROGRAMS * PROGRAMS
    for tile, pieces in found.items():
        taken = Counter(block for *_, first, end in pieces for block in range(first, end))
        assert taken == Counter(range(begin, begin + lengths[tile]))
        if tile < whole:
            assert len(pieces) == 1
            continue
        # The program that adds up the pieces expects consecutive programs to hold them.
        share = ProgramShare(*cut, None, None)
        first, last = programs_of_tile(tile - whole, lengths[tile], share)
        assert [program for program, *_ in pieces] == list(range(first, last + 1))
        for program, piece, *_ in pieces:
            assert piece == tile - whole - stream_k._shared_of(0, share, program)
            assert 0 <= piece < stream_k.PIECES.value


@pytest.mark.parametrize(("tiles", "blocks", "are_equal"), CALLS)
def test_memory_suffices_and_busiest_does_less(tiles: int, blocks: int, are_equal: bool) -> None:
    """There is memory for every piece and a counter for every shared tile."""
    cut, consumers, v_head_dim = cut_for(tiles, blocks, are_equal), 3, 64
    memory = stream_k.memory_for(cut, PROGRAMS, consumers, v_head_dim)
    numbers, counters = memory
    of_a_piece = stream_k.ROWS.value * (v_head_dim + 2)
    whole = tiles // PROGRAMS * PROGRAMS
    work: Counter[int] = Counter()
    for tile, pieces in pieces_of([blocks] * tiles, cut).items():
        for program, piece, first, end in pieces:
            work[program] += end - first
            slot = (program * stream_k.PIECES.value + piece) * consumers + consumers
            assert tile < whole or slot * of_a_piece <= numbers
        assert (tile - whole) * consumers + consumers <= counters
    assert max(work.values()) < -(-tiles // PROGRAMS) * blocks
