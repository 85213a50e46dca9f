"""The blocks of keys that a tile visits match a check of every pair of query and key."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper import key_ranges, persistent
from attention_kernels.hopper.head_groups import VisibleKeys, most_cut
from attention_kernels.hopper.key_ranges import CallBounds, ElementBounds

key_blocks_of, element_bounds_of = key_ranges.key_blocks_of.fn, key_ranges.element_bounds_of.fn
masked_of, block_at = key_ranges.masked_of.fn, key_ranges.block_at.fn
first_query_of, has_tile = key_ranges.first_query_of.fn, persistent.has_tile.fn
NOT_SHARED = SimpleNamespace(share=None)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Gluon's functions plain Python; a pointer becomes a list and a position."""
    plain = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
        load=lambda pointer: pointer,
        int32=int,
    )
    monkeypatch.setitem(key_blocks_of.__globals__, "gl", plain)
    monkeypatch.setattr(persistent, "tile_exists", key_ranges.tile_exists.fn)


class Pointer:
    def __init__(self, values: list[int], place: int = 0) -> None:
        self._values, self._place = values, place

    def __add__(self, places: int) -> Pointer:
        return Pointer(self._values, self._place + places)

    def to(self, dtype: type[int]) -> int:
        return dtype(self._values[self._place])


def sees(element: ElementBounds, bounds: CallBounds, query: int, key: int) -> bool:
    return (
        0 <= key < element.kv_len
        and (bounds.right is None or key <= query + element.highest)
        and (bounds.left is None or key >= query + element.lowest)
    )


SIDES = [(None, None), (None, 0), (5, 0), (None, 9), (7, None), (3, 2), (40, 0), (0, 0)]
LENGTHS = [(20, 20), (33, 7), (7, 33), (16, 16), (1, 50), (50, 1)]


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("is_bottom_right", [False, True])
@pytest.mark.parametrize(("left", "right"), SIDES)
@pytest.mark.parametrize(("rows", "keys"), [(4, 4), (8, 4), (4, 16)])
def test_blocks(
    rows: int,
    keys: int,
    left: int | None,
    right: int | None,
    is_bottom_right: bool,
    has_lengths: bool,
) -> None:
    for q_len, kv_len in LENGTHS:
        diagonal: Any = None if is_bottom_right else 0
        visible = VisibleKeys(
            q_len, kv_len, (kv_len - q_len) * is_bottom_right, left, right, rows, keys
        )
        bounds = CallBounds(
            q_len, kv_len, diagonal, left, right, most_cut(visible, has_lengths=has_lengths)
        )
        element = element_bounds_of(0, bounds)
        for row in range(0, q_len, rows):
            blocks = key_blocks_of(row, element, bounds, rows, keys)
            first, whole_first, whole_end, end = blocks
            assert 0 <= first <= whole_first <= whole_end < end
            assert end <= -(-kv_len // keys), "a last block without keys"
            # Without `most_cut`, kernels have no loop for keys that the right side cuts.
            if bounds.most_cut is None:
                assert whole_end == end - 1
            else:
                assert end - whole_end <= bounds.most_cut
            queries = range(row, row + rows)
            seen = {
                key // keys
                for query, key in itertools.product(queries, range(kv_len))
                if sees(element, bounds, query, key)
            }
            assert seen <= set(range(first, end)), "a visible block is left out"
            assert end - first <= max(len(seen), 1), "an invisible block is visited"
            for block in range(whole_first, whole_end):
                for query in queries:
                    for key in range(block * keys, (block + 1) * keys):
                        assert sees(element, bounds, query, key), "masked for some"
            numbered = [block_at(number, blocks, bounds) for number in range(end - first)]
            assert numbered[0] == end - 1
            assert sorted(numbered) == list(range(first, end))
            masked = masked_of(blocks, bounds)
            assert numbered[masked:] == list(reversed(range(whole_first, whole_end)))
            if left is not None:
                continue
            # Each half of the rows belongs to one consumer, which skips the first blocks.
            for own in range(row, row + rows, rows // 2):
                *_, own_end = key_blocks_of(own, element, bounds, rows // 2, keys)
                skipped = end - own_end
                assert 0 <= skipped < masked
                for query, key in itertools.product(range(own, own + rows // 2), range(kv_len)):
                    seen_by = sees(element, bounds, query, key)
                    assert not (seen_by and key // keys in numbered[:skipped])


Visited = dict[int, list[tuple[int, bool]]]


def visited_by_chunk(
    begin: int, end: int, tile: tuple[int, int], left: int | None, is_aligned: bool, early: int
) -> Visited:
    """Return the visible blocks of a causal chunk's queries in order, and whether each needs a
    mask. Tiles begin up to `early` rows before the chunk."""
    rows, keys = tile
    visible = VisibleKeys(end - begin + early, end, begin - early, left, 0, rows, keys)
    cut = most_cut(visible, has_lengths=False)
    bounds = CallBounds(
        end - begin, end, None, left, 0, cut, aligned_to=rows if is_aligned else None
    )
    element, found = element_bounds_of(0, bounds), Visited()
    for number in range(-1, -(-visible.q_len // rows)):  # -1 is a number without a tile
        first = first_query_of(number, element, bounds, rows)
        if not has_tile(0, first, element, NOT_SHARED, bounds, rows, keys, True):
            continue
        assert number >= 0
        assert first >= -early
        blocks = key_blocks_of(first, element, bounds, rows, keys)
        masked = masked_of(blocks, bounds)
        order = [block_at(place, blocks, bounds) for place in range(blocks[3] - blocks[0])]
        for query in range(max(first, 0), min(first + rows, end - begin)):
            assert begin + query not in found, "a query in two tiles"
            found[begin + query] = [
                (block, place < masked)
                for place, block in enumerate(order)
                if any(
                    sees(element, bounds, query, key)
                    for key in range(block * keys, (block + 1) * keys)
                )
            ]
    assert sorted(found) == list(range(begin, end))
    return found


@pytest.mark.parametrize("left", [None, 5, 20, 40])
@pytest.mark.parametrize("tile", [(4, 4), (8, 4), (4, 16), (16, 4)])
def test_aligned_tiles_visit_a_querys_keys_in_one_order(
    tile: tuple[int, int], left: int | None
) -> None:
    rows, _ = tile
    whole = visited_by_chunk(0, 100, tile, left, True, 0)
    chunks = list(itertools.pairwise([0, 5, 13, 29, 46, 64, 83, 100]))
    for begin, end in chunks:
        for early in (begin % rows, rows - 1):
            chunk = visited_by_chunk(begin, end, tile, left, True, early)
            assert chunk.items() <= whole.items()
    plain = [visited_by_chunk(*chunk, tile, left, False, 0) for chunk in chunks]
    is_narrow = left == 5  # every block needs a mask
    assert all(chunk.items() <= whole.items() for chunk in plain) == is_narrow


def test_most_blocks_need_no_mask() -> None:
    """If a window is a multiple of a block, one block on each side needs a mask."""
    bounds = CallBounds(4096, 4096, 0, 1023, 0)
    blocks = key_blocks_of(2048, element_bounds_of(0, bounds), bounds, 128, 128)
    assert masked_of(blocks, bounds) == 2
    order = [block_at(number, blocks, bounds) for number in range(9)]
    assert order == [16, 8, *range(15, 8, -1)]


def test_packed_and_padded() -> None:
    offsets, starts = Pointer([0, 5, 5, 20]), Pointer([0, 9, 20, 50])
    used = Pointer([9, 11, 4])
    bounds = CallBounds(99, 99, 0, 3, 0, 4, offsets, starts)
    assert element_bounds_of(2, bounds) == ElementBounds(5, 15, 20, 30, -3, 0)
    assert element_bounds_of(1, bounds) == ElementBounds(5, 0, 9, 11, -3, 0)
    assert element_bounds_of(2, bounds._replace(k_lengths=used, diagonal=None)) == ElementBounds(
        5, 15, 20, 4, -14, -11
    )
    padded = CallBounds(16, 40, 0, None, 0, None, None, Pointer([0, 7]), Pointer([40, 30]))
    assert element_bounds_of(1, padded) == ElementBounds(0, 16, 7, 30, 0, -7)
    assert element_bounds_of(1, padded._replace(diagonal=None)) == ElementBounds(
        0, 16, 7, 30, 0, 14
    )
    assert element_bounds_of(1, padded._replace(k_starts=None)) == ElementBounds(0, 16, 0, 30, 0, 0)
