"""How many heads are worked on at a time, checked against the tiles that programs then take."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from replay.kernels.triton import persistent
from replay.kernels.triton.sections import (
    MOST_BYTES,
    PLAIN_BYTES,
    TILE_BLOCKS,
    Sight,
    blocks_seen,
    busiest_of,
    section_of,
)

PROGRAMS = 132
CAUSAL_8K = Sight(8192, 8192, 0, None, 0, 128, 128)


tile_number, turns_of = persistent.tile_number.fn, persistent.turns_of.fn
place_of = persistent.place_of.fn


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that place a tile, as Python has them."""
    monkeypatch.setitem(turns_of.__globals__, "tile_number", tile_number)
    monkeypatch.setattr(persistent.gl, "minimum", min)


@pytest.mark.parametrize(
    "sight",
    [
        Sight(1000, 1000, 0, None, 0, 128, 64),
        Sight(300, 1000, 700, None, 0, 192, 128),
        Sight(1000, 300, 0, None, 0, 64, 128),
        Sight(1000, 1000, 0, 255, 0, 128, 128),
        Sight(1000, 900, -100, 130, 70, 128, 64),
        Sight(500, 700, 0, 100, None, 128, 64),
    ],
)
def test_blocks_that_queries_see(sight: Sight) -> None:
    q_len, kv_len, diagonal, left, right, queries, keys = sight
    counted = []
    for first in range(0, q_len, queries):
        seen = {
            key // keys
            for query in range(first, first + queries)
            for key in range(kv_len)
            if (left is None or key >= query + diagonal - left)
            and (right is None or key <= query + diagonal + right)
        }
        counted.append(max(1, len(seen)))  # one is visited where none is seen
    assert blocks_seen(sight).tolist() == counted


@pytest.mark.parametrize("section", [1, 3, 4, 12, 16])
def test_the_busiest_program_is_the_kernels(section: int) -> None:
    """The same sum over the tiles that the kernel's arithmetic gives each program."""
    heads, blocks = 16, blocks_seen(CAUSAL_8K)
    tiles = heads * len(blocks)
    work = []
    for program in range(PROGRAMS):
        turns = turns_of(tiles, program, PROGRAMS, True)
        numbers = (tile_number(turn, program, PROGRAMS, True) for turn in range(turns))
        places = [place_of(number, len(blocks), heads, section, True) for number in numbers]
        work.append(sum(int(blocks[block]) + TILE_BLOCKS for _, block in places))
    expected = max(work) * PROGRAMS / sum(work)
    assert busiest_of(blocks, heads, section, PROGRAMS) == pytest.approx(expected)


@pytest.mark.parametrize("heads", [16, 32, 48, 128])
@pytest.mark.parametrize("in_cache", [4, 8, 12, 16, 24, 40])
@pytest.mark.parametrize("kv_len", [4096, 8192, 16384])
def test_programs_of_causal_calls_end_together(kv_len: int, in_cache: int, heads: int) -> None:
    """However many heads have room in the L2: in sections of all that do, the busiest of these
    programs had up to 1.7 times the average."""
    sight = CAUSAL_8K._replace(q_len=kv_len, kv_len=kv_len)
    section = section_of(MOST_BYTES // in_cache, heads, 1, PROGRAMS, True, sight)
    assert section <= in_cache or section == heads
    assert busiest_of(blocks_seen(sight), heads, section, PROGRAMS) < 1.08


def test_keys_from_memory_only_where_sections_are_uneven() -> None:
    even = section_of(MOST_BYTES // 12, 32, 1, PROGRAMS, True, CAUSAL_8K)
    uneven = section_of(MOST_BYTES // 4, 16, 1, PROGRAMS, True, CAUSAL_8K)
    assert (even, uneven) == (11, 16)


def test_heads_that_share_keys_stay_together() -> None:
    assert section_of(MOST_BYTES // 4, 32, 4, PROGRAMS, True, CAUSAL_8K) % 4 == 0


@pytest.mark.parametrize("by_length", [False, True])
def test_as_many_heads_as_have_room_where_nothing_is_known(by_length: bool) -> None:
    most = MOST_BYTES if by_length else PLAIN_BYTES
    assert section_of(most // 5, 32, 2, PROGRAMS, by_length, None) == 10
    assert section_of(most * 2, 32, 2, PROGRAMS, by_length, None) == 2
    assert section_of(1, 32, 2, PROGRAMS, by_length, None) == 32
