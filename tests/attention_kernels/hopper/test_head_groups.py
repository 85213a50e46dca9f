"""The order of tiles and the sizes of head groups are checked as plain arithmetic."""

import itertools
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import head_groups, persistent
from attention_kernels.hopper.head_groups import (
    TILE_BLOCKS,
    HeadGroup,
    VisibleKeys,
    blocks_seen,
    busiest_of,
    head_group_of,
)

PROGRAMS = 132
CAUSAL_8K = VisibleKeys(8192, 8192, 0, None, 0, 128, 128)


tile_number, turns_of = persistent.tile_number.fn, persistent.turns_of.fn


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the functions that place a tile plain Python."""
    monkeypatch.setitem(turns_of.__globals__, "tile_number", tile_number)
    monkeypatch.setattr(persistent.gl, "where", lambda which, yes, no: yes if which else no)
    monkeypatch.setattr(persistent, "quotient", lambda n, of: n * (of & 0xFFFFFFFF) >> (of >> 32))


def places_of(
    numbers: Iterable[int], blocks: int, heads: int, head_group: HeadGroup, by_length: bool
) -> list[tuple[int, int]]:
    """Return the head and the block of each number that has a tile."""
    work = persistent.work_of(1, 1, blocks, heads, head_group, PROGRAMS)
    reciprocals = [work[f"of_{each}"] for each in ("head_groups", "head_group", "last")]
    places = [
        persistent.place_of.fn(tile, blocks, heads, *head_group, *reciprocals, by_length)
        for tile in numbers
    ]
    return [(head, block) for head, block in places if block >= 0]


@pytest.mark.parametrize(
    "visible",
    [
        VisibleKeys(1000, 1000, 0, None, 0, 128, 64),
        VisibleKeys(300, 1000, 700, None, 0, 192, 128),
        VisibleKeys(1000, 300, 0, None, 0, 64, 128),
        VisibleKeys(1000, 1000, 0, 255, 0, 128, 128),
        VisibleKeys(1000, 900, -100, 130, 70, 128, 64),
        VisibleKeys(500, 700, 0, 100, None, 128, 64),
    ],
)
def test_blocks_that_queries_see(visible: VisibleKeys) -> None:
    q_len, kv_len, diagonal, left, right, queries, keys = visible
    counted = []
    for first in range(0, q_len, queries):
        seen = {
            key // keys
            for query in range(first, first + queries)
            for key in range(kv_len)
            if (left is None or key >= query + diagonal - left)
            and (right is None or key <= query + diagonal + right)
        }
        counted.append(max(1, len(seen)))  # one block is visited even if no key is visible
    assert blocks_seen(visible).tolist() == counted
    assert blocks_seen(visible.in_whole_blocks()).tolist() == counted


def tiles_of(program: int, programs: int, tiles: int, is_causal: bool) -> list[int]:
    turns = turns_of(tiles, tiles // programs, program, programs, is_causal)
    return [tile_number(turn, program, programs, is_causal) for turn in range(turns)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 3, PROGRAMS])
@pytest.mark.parametrize("tiles", [1, 5, 131, 132, 133, 264, 4096, 4097])
def test_every_tile_is_taken_once(tiles: int, programs: int, is_causal: bool) -> None:
    programs = min(tiles, programs)
    taken = (tiles_of(program, programs, tiles, is_causal) for program in range(programs))
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(tiles))


def group_of(size: int, blocks: int, in_whole_turns: bool) -> HeadGroup:
    unit = PROGRAMS if in_whole_turns else 1
    return HeadGroup(size, -(-size * blocks // unit) * unit)


@pytest.mark.parametrize("in_whole_turns", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 12, 16])
def test_the_busiest_program_is_the_kernels(size: int, in_whole_turns: bool) -> None:
    """The prediction is the sum over the tiles that the kernel's arithmetic assigns a program."""
    heads, blocks = 16, blocks_seen(CAUSAL_8K)
    head_group = group_of(size, len(blocks), in_whole_turns)
    tiles = persistent.work_of(1, 1, len(blocks), heads, head_group, PROGRAMS)["tiles"]
    work = []
    for program in range(PROGRAMS):
        numbers = tiles_of(program, PROGRAMS, tiles, True)
        places = places_of(numbers, len(blocks), heads, head_group, True)
        work.append(sum(int(blocks[block]) + TILE_BLOCKS for _, block in places))
    assert busiest_of(blocks + TILE_BLOCKS, heads, head_group, PROGRAMS) == max(work)


@pytest.mark.parametrize(
    ("by_length", "in_whole_turns"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_every_block_of_every_head_has_one_number(
    size: int, by_length: bool, in_whole_turns: bool
) -> None:
    heads, blocks = 20, 9
    head_group = group_of(size, blocks, in_whole_turns)
    tiles = persistent.work_of(1, 1, blocks, heads, head_group, PROGRAMS)["tiles"]
    places = places_of(range(tiles), blocks, heads, head_group, by_length)
    assert sorted(places) == [(head, block) for head in range(heads) for block in range(blocks)]


@pytest.mark.parametrize("heads", [2, 5, 16, 32, 48, 256])
@pytest.mark.parametrize("head_bytes", [2**17, 2**20, 2**23])
@pytest.mark.parametrize("kv_len", [512, 4096, 8192, 16384])
def test_programs_of_causal_calls_end_together(kv_len: int, head_bytes: int, heads: int) -> None:
    """Programs end at nearly the same time, as far as the smallest tiles allow. With groups of as
    many heads as fit in the L2 cache, the busiest program had up to 1.7 times the average work."""
    visible = CAUSAL_8K._replace(q_len=kv_len, kv_len=kv_len)
    times = blocks_seen(visible) + TILE_BLOCKS
    head_group = head_group_of(visible, head_bytes, heads, 1, PROGRAMS)
    average = int(times.sum()) * heads / PROGRAMS
    together = busiest_of(times, heads, group_of(heads, len(times), False), PROGRAMS)
    assert busiest_of(times, heads, head_group, PROGRAMS) < max(1.03 * average, 1.05 * together)


def test_no_tensor_is_where_a_model_makes_its_own() -> None:
    expected = head_group_of(CAUSAL_8K, 2**22, 32, 1, PROGRAMS)
    head_groups._balanced.cache_clear()
    with torch.device("meta"):
        assert head_group_of(CAUSAL_8K, 2**22, 32, 1, PROGRAMS) == expected
