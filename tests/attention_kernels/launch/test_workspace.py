"""Size of the memory that is kept: sufficient, hardly larger, and rarely changed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from attention_kernels.launch import workspace


def test_it_is_enough_and_an_eighth_more_at_most() -> None:
    for size in (1, 1000, 1025, 5000, 70_000, 4_392_960, 2**23, 2**23 + 1):
        assert size <= workspace._ample(size) <= max(size * 9 / 8, size + 1024)


def test_growing_calls_seldom_need_another() -> None:
    """A decoder's parts grow with every few tokens."""
    sizes = {workspace._ample(size) for size in range(100_000, 200_000)}
    assert len(sizes) < 20
