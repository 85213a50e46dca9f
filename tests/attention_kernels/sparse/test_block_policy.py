"""Policies keep the blocks that their formulas say, and refuse to leave a query without a block."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kernels.sparse.block_policy import SAMPLES, BlockPolicy, kept_blocks

ROWS, KEYS = 4, 2
POOLED = torch.tensor([[0.0, 2.0, 1.0, 3.0], [3.0, 0.0, 2.0, 1.0]])
"""Scores of two tiles and four blocks; p of the first is 0.032, 0.237, 0.087, 0.644."""


def kept_of(policy: BlockPolicy, pooled: Tensor = POOLED, **options: Any) -> list[list[int]]:
    """Return the blocks that each tile keeps if its pooled scores are `pooled`."""
    tiles, blocks = pooled.shape
    query = torch.eye(tiles).repeat_interleave(ROWS, dim=0)[None, None]
    # Two keys that differ from their mean by the same amount in both directions.
    apart = torch.tensor([1.0, -1.0]).repeat(blocks)[:, None]
    key = (pooled.mT.repeat_interleave(KEYS, dim=0) + apart)[None, None]
    kept = kept_blocks(query, key, policy, ROWS, KEYS, scale=1.0, **options)
    return [row.nonzero().flatten().tolist() for row in kept[0, 0]]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (0.1, [[3], [0]]),
        (0.3, [[3], [0]]),
        (0.4, [[1, 3], [0, 2]]),
        (0.75, [[1, 2, 3], [0, 2, 3]]),
        (1.0, [[0, 1, 2, 3]] * 2),
    ],
)
def test_a_share_keeps_the_highest_scores(keep: float, kept: list[list[int]]) -> None:
    assert kept_of(BlockPolicy(keep=keep)) == kept


@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (0.6, [[3], [0]]),
        (0.65, [[1, 3], [0, 2]]),
        (0.9, [[1, 2, 3], [0, 2, 3]]),
        (0.97, [[0, 1, 2, 3]] * 2),
    ],
)
def test_a_mass_keeps_the_fewest_blocks(mass: float, kept: list[list[int]]) -> None:
    assert kept_of(BlockPolicy(mass=mass)) == kept


def test_a_mass_of_one_keeps_blocks_without_weight() -> None:
    pooled = torch.tensor([[0.0, -500.0, 0.0, -500.0]])
    assert kept_of(BlockPolicy(mass=1.0), pooled) == [[0, 1, 2, 3]]
    assert kept_of(BlockPolicy(mass=0.999), pooled) == [[0, 2]]


def test_of_equal_scores_the_first_are_kept() -> None:
    equal = torch.zeros(1, 4)
    assert kept_of(BlockPolicy(keep=0.5), equal) == [[0, 1]]
    assert kept_of(BlockPolicy(mass=0.7), equal) == [[0, 1, 2]]


def test_a_causal_tile_chooses_among_the_blocks_that_it_sees() -> None:
    """Tile 0 sees blocks 0 and 1, both on the diagonal; tile 1 sees all, 2 and 3 on it."""
    assert kept_of(BlockPolicy(keep=0.25), is_causal=True) == [[0, 1], [2, 3]]
    assert kept_of(BlockPolicy(keep=0.75), is_causal=True) == [[0, 1], [0, 2, 3]]
    assert kept_of(BlockPolicy(mass=0.3), is_causal=True) == [[0, 1], [2, 3]]
    assert kept_of(BlockPolicy(mass=0.7), is_causal=True) == [[0, 1], [0, 2, 3]]


def test_heads_have_shares_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 64, 16, generator=generator)
    key = torch.randn(2, 2, 80, 16, generator=generator)
    shares = (0.25, 1.0, 0.5, 0.125)
    for together in (BlockPolicy(keep=shares), BlockPolicy(mass=shares)):
        kept = kept_blocks(query, key, together, 16, 10)
        for head, share in enumerate(shares):
            alone = BlockPolicy(keep=share) if together.mass is None else BlockPolicy(mass=share)
            assert torch.equal(kept[:, head], kept_blocks(query, key, alone, 16, 10)[:, head])
    assert kept_blocks(query, key, BlockPolicy(keep=shares), 16, 10).sum(3)[0, :, 0].tolist() == [
        2, 8, 4, 1
    ]  # fmt: skip


def test_means_are_those_of_sampled_rows() -> None:
    """Rows that are not sampled, here those with odd numbers, have no influence."""
    query = torch.ones(1, 1, 2 * SAMPLES, 8)
    key = torch.zeros(1, 1, 4 * SAMPLES, 8)
    key[:, :, 2 * SAMPLES :: 2] = 1.0
    key[:, :, 1 : 2 * SAMPLES : 2] = math.nan
    kept = kept_blocks(query, key, BlockPolicy(keep=0.5), 2 * SAMPLES, 2 * SAMPLES)
    assert kept.flatten().tolist() == [False, True]


def test_a_short_last_block_counts_by_its_keys() -> None:
    """With equal means, a block of one key has a third of the weight of one of three."""
    query, key = torch.ones(1, 1, 3, 8), torch.ones(1, 1, 4, 8)
    assert kept_blocks(query, key, BlockPolicy(mass=0.74), 3, 3).flatten().tolist() == [True, False]
    assert kept_blocks(query, key, BlockPolicy(mass=0.76), 3, 3).all()


@pytest.mark.parametrize("window", [(0, 0, 0), (1, 0, 2), (0, 9, 0), (2, 1, 1)])
@pytest.mark.parametrize("text", [0, 7, 16])
def test_a_window_keeps_every_block_in_reach(text: int, window: tuple[int, int, int]) -> None:
    """The map is compared with a check of every pair of tokens."""
    grid = (3, 4, 5)
    places = list(itertools.product(*map(range, grid)))
    length, rows, keys = text + len(places), 8, 5

    def sees(query: int, key: int) -> bool:
        if min(query, key) < text:
            return True
        apart = zip(places[query - text], places[key - text], window, strict=True)
        return all(abs(here - there) <= reach for here, there, reach in apart)

    pairs = torch.tensor([[sees(q, k) for k in range(length)] for q in range(length)])
    padded = torch.nn.functional.pad(pairs, (0, -length % keys, 0, -length % rows))
    expected = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, keys)).any(3).any(1)
    tensor = torch.zeros(2, 3, length, 8)
    kept = kept_blocks(tensor, tensor, BlockPolicy(window=window, grid=grid), rows, keys)
    assert torch.equal(kept, expected.expand(2, 3, -1, -1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "give exactly one of keep, mass and window, got none of them"),
        ({"keep": 0.5, "mass": 0.5}, "one of keep, mass and window, got keep and mass"),
        ({"keep": 0.0}, "keep must be more than 0 and at most 1, got 0: use a share such as 0.5"),
        ({"keep": (0.5, 1.5)}, "keep must be more than 0 and at most 1, got 1.5"),
        ({"mass": math.nan}, "mass must be more than 0"),
        ({"keep": "a"}, "keep must be a number, or a tuple of one for each head, got 'a'"),
        ({"mass": [0.5, 1.0]}, "mass must be a number, or a tuple of one for each head"),
        ({"window": (1, 1, 1)}, "window needs a grid: add the numbers of frames"),
        ({"keep": 0.5, "grid": (1, 1, 1)}, "leave it out, or replace keep by one"),
        ({"window": (0, -1, 0), "grid": (1, 1, 1)}, "window must be .* at least 0"),
        ({"window": 1, "grid": (1, 1, 1)}, "window must be a tuple of three integers .* got 1"),
        ({"window": (0, 0, 0), "grid": (0, 1, 1)}, "grid must be .* at least 1"),
    ],
)
def test_refuses_policies_without_a_meaning(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        BlockPolicy(**fields)


@pytest.mark.parametrize(
    ("policy", "is_causal", "reason"),
    [
        (BlockPolicy(keep=(0.5, 1.0)), False, "2 shares for 3 query heads"),
        (
            BlockPolicy(window=(1, 1, 1), grid=(2, 2, 5)),
            False,
            "as many queries as keys, and at least 20: this call has 12",
        ),
        (BlockPolicy(window=(1, 1, 1), grid=(2, 2, 2)), True, "takes no causal calls"),
    ],
)
def test_refuses_calls_that_do_not_fit(policy: BlockPolicy, is_causal: bool, reason: str) -> None:
    tensor = torch.zeros(1, 3, 12, 8)
    with pytest.raises(ValueError, match=reason):
        kept_blocks(tensor, tensor, policy, 4, 4, is_causal=is_causal)
