"""The order of tiles, as plain arithmetic: every tile occurs once, and work is balanced."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import persistent

tile_number, turns_of = persistent.tile_number.fn, persistent.turns_of.fn


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both functions plain Python, since one calls the other."""
    monkeypatch.setitem(turns_of.__globals__, "tile_number", tile_number)
    monkeypatch.setattr(persistent.gl, "where", lambda which, yes, no: yes if which else no)


def tiles_of(program: int, programs: int, tiles: int, is_causal: bool) -> list[int]:
    turns = turns_of(tiles, tiles // programs, program, programs, is_causal)
    return [tile_number(turn, program, programs, is_causal) for turn in range(turns)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 3, 132])
@pytest.mark.parametrize("tiles", [1, 5, 131, 132, 133, 264, 4096, 4097])
def test_every_tile_is_taken_once(tiles: int, programs: int, is_causal: bool) -> None:
    programs = min(tiles, programs)
    taken = (tiles_of(program, programs, tiles, is_causal) for program in range(programs))
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(tiles))


@pytest.mark.parametrize(("heads", "blocks"), [(32, 32), (32, 64), (512, 8), (8, 64)])
def test_causal_work_sums_up_evenly(heads: int, blocks: int) -> None:
    """Tile `number` is one of `heads` tiles with as many key blocks, the largest number first."""
    programs = 132
    taken = [tiles_of(program, programs, heads * blocks, True) for program in range(programs)]
    work = [sum(blocks - number // heads for number in numbers) for numbers in taken]
    assert max(work) <= sum(work) / programs + 5
