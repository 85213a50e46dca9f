"""On a GPU, block-sparse attention agrees with float64 attention to the chosen blocks, and long
calls choose the blocks that the formula chooses.

`tests/attention_kernels/sparse` has more cases, which also run on a GPU. A program is compiled for
each tile, type and causality.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_kernels.sparse.block_choice import choose_blocks, map_of
from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
from attention_kernels.sparse.block_sparse import block_sizes
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import find
from tests.attention_kernels.calls import verify
from tests.factories import normal, sized_call

DEVICE = torch.device("cuda")
NAME = "triton-block-sparse"
SHAPES = (
    (2, 4, 2, 1000, 1000),
    (1, 2, 2, 129, 900),
    (1, 2, 1, 700, 127),
    (3, 24, 8, 700, 2000),  # more tiles than programs
)
"""(B, Hq, Hkv, Sq, Sk)."""


def call_of(sizes: tuple[int, ...], head_dim: int, **fields: Any) -> AttentionCall:
    dtype = fields.pop("dtype", torch.bfloat16)
    return sized_call((*sizes, head_dim, head_dim), dtype=dtype, device=DEVICE, **fields)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_shapes(head_dim: int, is_causal: bool, sizes: tuple[int, ...]) -> None:
    for options in ("[keep=0.3]", "[mass=0.8]"):
        verify(NAME + options, call_of(sizes, head_dim, is_causal=is_causal))


@pytest.mark.parametrize("head_dim", [64, 128, 40])
def test_types_and_layouts(head_dim: int) -> None:
    packed = torch.randn(2, 333, 3, 4, head_dim, device=DEVICE, dtype=torch.float16)
    query, key, value = (packed[:, :, part].transpose(1, 2) for part in range(3))
    verify(NAME, AttentionCall(query, key, value))
    odd = torch.randn(2, 4, 333, head_dim + 1, device=DEVICE, dtype=torch.float16)[..., 1:]
    verify(NAME, AttentionCall(odd, key, odd))
    verify(NAME, AttentionCall(query.float(), key.float(), value.float()))


@pytest.mark.parametrize("step", [9.0, 150.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_rise_and_fall(head_dim: int, step: float) -> None:
    """Weights relative to an earlier maximum score would overflow."""
    call = call_of((1, 2, 1, 300, 3000), head_dim, dtype=torch.float16)
    call.query[..., 0] = torch.arange(300, device=DEVICE) % 3 - 1
    call.key[..., 0] = torch.arange(3000, device=DEVICE) // 128 * step * head_dim**0.5
    for options in ("[keep=0.5]", "[keep=0.2/1]"):
        verify(NAME + options, call)
        verify(NAME + options, replace(call, query=call.query[:, :, :100], is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [46 * 384, 183 * 384])  # whole tiles and blocks
def test_long_calls_choose_what_the_formula_chooses(length: int, is_causal: bool) -> None:
    """Means of whole numbers are exact, so that the maps are equal, with many equal scores."""
    query, key = (
        normal(1, heads, length, 64, seed=heads, device=DEVICE).round().bfloat16()
        for heads in (4, 2)
    )
    rows, keys = block_sizes(query, key, key)
    for keep in (0.1, (0.5, 0.3, 1.0, 0.9)):
        policy = BlockPolicy(keep=keep)
        visited = choose_blocks(query, key, key, policy, is_causal=is_causal)
        expected = kept_blocks(query, key, policy, rows, keys, is_causal=is_causal)
        assert torch.equal(map_of(visited, keys), expected)
    by_mass = BlockPolicy(mass=0.7)
    counts = choose_blocks(query, key, key, by_mass, is_causal=is_causal).counts.sum(-1)
    expected = kept_blocks(query, key, by_mass, rows, keys, is_causal=is_causal)
    assert (counts - expected.sum(-1)).abs().max() <= 1  # sums are rounded in another order


def test_the_same_bits_each_time() -> None:
    """A race between loads, products and stores would change bits."""
    for head_dim, is_causal in ((64, False), (128, False), (128, True)):
        call = call_of((2, 16, 4, 777, 1500), head_dim, is_causal=is_causal)
        attend = find(f"{NAME}[keep=0.4]").attention
        first = attend(**call.arguments())
        for _ in range(20):
            assert torch.equal(attend(**call.arguments()), first)
