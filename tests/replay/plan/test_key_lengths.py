"""Ranges of key lengths hold their own lengths, and share the lengths between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.plan.key_lengths import (
    KeyLengths,
    index_of,
    kernel_for,
    kernels_by_length,
    ranges_of,
    within_reach,
)


@given(st.sets(st.integers(1, 10_000), min_size=1), st.integers(1, 20_000))
def test_every_length_belongs_to_the_nearest_range(lengths: set[int], kv_len: int) -> None:
    ranges = ranges_of(lengths)
    assert [index for index, each in enumerate(ranges) if each.low <= kv_len <= each.high] in (
        [],
        [index_of(kv_len, ranges)],
    )
    assert {index_of(length, ranges) for length in lengths} == set(range(len(ranges)))
    ratios = [max(each.low / kv_len, kv_len / each.high, 1.0) for each in ranges]
    assert ratios[index_of(kv_len, ranges)] == pytest.approx(min(ratios))
    kernels = kernels_by_length([(each, str(each)) for each in ranges])
    assert kernel_for(kv_len, kernels) == str(ranges[index_of(kv_len, ranges)])
    is_near = any(each.low <= kv_len <= each.high for each in within_reach(ranges))
    assert is_near == (min(ratios) <= 1.25)


@pytest.mark.parametrize(
    ("lengths", "ranges"),
    [
        ((77, 4, 77), [(4, 4), (77, 77)]),
        ((1, 2, 3, 4, 5), [(1, 5)]),
        ((80, 100, 125, 157), [(80, 125), (157, 157)]),
    ],
    ids=["two encoders", "cache", "at most 1.25 times"],
)
def test_near_lengths_share_a_range(lengths: tuple[int, ...], ranges: list[KeyLengths]) -> None:
    assert ranges_of(lengths) == ranges
