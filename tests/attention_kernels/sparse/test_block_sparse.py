"""The kernels choose the blocks of `kept_blocks`, and attend to the chosen blocks only."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.sparse import block_sparse
from attention_kernels.sparse.block_choice import choose_blocks, map_of, visited_of
from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
from attention_kernels.sparse.block_sparse import block_sizes, block_sparse_attention
from capture.call.attention_call import AttentionCall
from replay.kernels.chosen_keys import mask_of_blocks
from replay.kernels.registry import KernelNameError, find
from tests.attention_kernels.calls import DEVICE, assert_near, call_of, verify
from tests.attention_kernels.eager import attend
from tests.factories import random_call

NAME = "triton-block-sparse"
CALLS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "whole tiles and blocks": ((256, 512), {}),
    "partial tiles and blocks": ((300, 650), {"batch": 2}),
    "fewer keys than a block": ((150, 20), {}),
    "more queries than keys": ((400, 150), {"q_heads": 4, "kv_heads": 2}),
    "small tiles": ((150, 300), {"dtype": torch.float32, "head_dim": 40, "v_head_dim": 24}),
    "bfloat16": ((150, 300), {"dtype": torch.bfloat16, "head_dim": 96, "kv_heads": 2}),
}


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the portable kernel on Hopper too, whose own kernel has no `skip`."""
    monkeypatch.setattr(block_sparse, "_is_for_hopper", lambda query, value: False)
    monkeypatch.setattr(block_sparse, "can_skip", lambda query: True)


def sparse_call(name: str, **fields: Any) -> AttentionCall:
    sizes, own = CALLS[name]
    return call_of(*sizes, **{**own, **fields})


@pytest.mark.parametrize("options", ["", "[keep=0.2]", "[mass=0.7]"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel(name: str, is_causal: bool, options: str) -> None:
    assert find(NAME).accuracy_class == "sparse"
    verify(NAME + options, sparse_call(name, is_causal=is_causal))


@pytest.mark.parametrize("options", ["keep=0.1/1", "mass=1/0.3", "window=0x1x2,grid=2x10x12"])
@pytest.mark.parametrize("scale", [None, 0.0, -0.2])
def test_policies_and_scales(options: str, scale: float | None) -> None:
    call = call_of(260, 260, scale=scale, dtype=torch.float32)
    verify(f"{NAME}[{options}]", call)


def test_a_head_that_keeps_all_is_dense() -> None:
    call = call_of(150, 300, dtype=torch.float32)
    output = find(f"{NAME}[keep=0.2/1]").attention(**call.arguments())
    expected = attend(call.query, call.key, call.value).output
    assert_near(output[:, 1], expected[:, 1])
    assert (output[:, 0].double() - expected[:, 0]).abs().max() > 0.1


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_kernels_choose_what_the_formula_chooses(data: st.DataObject) -> None:
    """The lists hold the blocks of the map in order: whole blocks, and blocks seen in part."""
    group, kv_heads, batch = (data.draw(st.integers(1, 2)) for _ in range(3))
    q_len, k_len = (data.draw(st.integers(1, 400)) for _ in range(2))
    heads = group * kv_heads
    share = data.draw(st.sampled_from([0.01, 0.3, 0.5, 0.9, 1.0]))
    shares = tuple(data.draw(st.sampled_from([share, 0.7])) for _ in range(heads))
    by_mass, is_causal = data.draw(st.booleans()), data.draw(st.booleans())
    policy = BlockPolicy(mass=shares) if by_mass else BlockPolicy(keep=shares)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    call = random_call(
        batch=batch, q_heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=k_len, head_dim=24,
        dtype=dtype, device=DEVICE, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    tensors = call.query, call.key, call.value
    rows, keys = block_sizes(*tensors)
    visited = choose_blocks(*tensors, policy, is_causal=is_causal)
    expected = kept_blocks(*tensors[:2], policy, rows, keys, is_causal=is_causal)
    assert torch.equal(map_of(visited, keys), expected)
    end = k_len // keys
    for place, kept in enumerate(expected.flatten(0, 2)):
        if is_causal:
            end = min(k_len, place % expected.shape[2] * rows + 1) // keys
        whole, cut = (
            visited.blocks.flatten(0, 2)[place, kind, :count].tolist()
            for kind, count in enumerate(visited.counts.flatten(0, 2)[place])
        )
        assert whole == [int(block) * keys for block in kept.nonzero() if block < end]
        assert cut == [int(block) * keys for block in kept.nonzero() if block >= end]
    again = visited_of(expected, *tensors, is_causal=is_causal)
    assert torch.equal(again.counts, visited.counts)
    assert torch.equal(map_of(again, keys), expected)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_blocks_that_are_not_kept_are_not_read(is_causal: bool) -> None:
    call = call_of(256, 640, is_causal=is_causal)
    tensors = call.query, call.key, call.value
    rows, keys = block_sizes(*tensors)
    kept = torch.zeros(1, 1, -(-256 // rows), -(-640 // keys), dtype=torch.bool, device=DEVICE)
    kept[..., 0] = True
    visited = visited_of(kept, *tensors, is_causal=is_causal)
    call.key[:, :, keys:] = call.value[:, :, keys:] = math.nan
    output, lse = block_sparse_attention(*tensors, visited, is_causal=is_causal, return_lse=True)
    first = call.query, call.key[:, :, :keys], call.value[:, :, :keys]
    expected = attend(*first, is_causal=is_causal)
    assert_near(output, expected.output)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=1e-3)


def test_any_map_of_blocks_is_attended_to() -> None:
    call = call_of(300, 650, batch=2)
    tensors = call.query, call.key, call.value
    rows, keys = block_sizes(*tensors)
    shape = 2, 2, -(-300 // rows), -(-650 // keys)
    kept = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4).to(DEVICE)
    kept[..., 2] = True
    output = block_sparse_attention(*tensors, visited_of(kept, *tensors))
    mask = mask_of_blocks(kept, rows, keys, call)
    assert_near(output, attend(*tensors, mask).output)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", CALLS)
def test_blocks_of_small_weights_are_skipped(name: str, is_causal: bool) -> None:
    """The kernel is judged on the blocks that it did not skip."""
    call = sparse_call(name, is_causal=is_causal)
    _, keys = block_sizes(call.query, call.key, call.value)
    call.query.abs_()
    call.key[:, :, :keys].abs_().mul_(4)
    call.key[:, :, keys:] = 0.0
    verify(f"{NAME}[skip=0.5]", call)
    chosen = find(f"{NAME}[skip=0.5]").chosen
    assert chosen is not None
    kept = chosen(call)[:, :, :, 0, :, 0]
    assert kept[..., 0].all()
    assert not kept[..., 1:].any()


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(("skip", "kept"), [(1e-4, [[1, 0, 1], [1, 1, 1]]), (1e-5, [[1] * 3] * 2)])
def test_a_block_is_skipped_if_its_weights_are_small_for_all_queries(
    skip: float, kept: list[list[int]]
) -> None:
    """Scores of the blocks are 10, 0 and 10, and exp(-10) = 4.5e-5. For one query of the second
    tile, which is half full, they are -10, 0 and -10."""
    rows, keys = block_sizes(*(torch.zeros(1, 1, 999, 16, device=DEVICE),) * 3)
    query = torch.zeros(1, 1, rows + rows // 2, 16, device=DEVICE)
    key, value = (torch.zeros(1, 1, 3 * keys, 16, device=DEVICE) for _ in range(2))
    query[..., 0], query[..., -1, 0] = 1.0, -1.0
    key[:, :, :keys, 0] = key[:, :, 2 * keys :, 0] = 10.0
    value[:, :, keys : 2 * keys] = 1.0
    value[:, :, keys] = math.nan
    every = torch.ones(1, 1, 2, 3, dtype=torch.bool, device=DEVICE)
    visited = visited_of(every, query, key, value)
    output, computed = block_sparse_attention(
        query, key, value, visited, scale=1.0, skip=skip, return_map=True
    )
    assert computed[0, 0].int().tolist() == kept
    assert output[0, 0].isnan().any(1).tolist() == [
        kept[row // rows][1] == 1 for row in range(query.shape[2])
    ]


def test_refuses_shares_to_skip() -> None:
    for text, reason in (("2", "less than 1, got 2"), ("few", "a number, got 'few'")):
        with pytest.raises(KernelNameError, match=reason):
            find(f"{NAME}[skip={text}]")


def test_refuses_maps_and_lists_that_do_not_fit() -> None:
    call = call_of(256, 640)
    tensors = call.query, call.key, call.value
    rows, keys = block_sizes(*tensors)
    kept = torch.ones(1, 1, -(-256 // rows), -(-640 // keys), dtype=torch.bool, device=DEVICE)
    visited = visited_of(kept, *tensors)
    with pytest.raises(ValueError, match="tiles and 5 blocks of 1 heads"):
        block_sparse_attention(call.query, call.key[:, :, :512], call.value[:, :, :512], visited)
    with pytest.raises(ValueError, match="2 tiles, 5 blocks"):
        visited_of(kept[..., 1:], *tensors)
    kept[:, :, 1] = False
    with pytest.raises(ValueError, match="leaves a query without a key"):
        visited_of(kept, *tensors)
    kept[:, :, 1, 3:] = True  # keys after those of the tile's first query
    visited_of(kept, *tensors)
    with pytest.raises(ValueError, match="leaves a query without a key"):
        visited_of(kept, *tensors, is_causal=True)


QUERY, KEY = (torch.zeros(1, 1, length, 16, device=DEVICE) for length in (8, 20))
VISITED = choose_blocks(QUERY, KEY, KEY, BlockPolicy(keep=1.0))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (partial(block_sparse_attention, QUERY, KEY, KEY, BlockPolicy(keep=1.0)),
         r"result of choose_blocks\(...\) or visited_of\(...\), got BlockPolicy"),
        (partial(block_sparse_attention, QUERY, KEY, KEY, VISITED, skip="a"),
         "skip must be a number or None, got str"),
        (partial(block_sparse_attention, QUERY, None, KEY, VISITED), "key must be a tensor"),
        (partial(visited_of, torch.ones(1, 1, 1, 1), QUERY, KEY, KEY),
         "kept in torch.float32: needs bool, for example kept > 0"),
        (partial(visited_of, [[True]], QUERY, KEY, KEY), "kept must be a tensor, got list"),
        (partial(choose_blocks, QUERY, KEY, KEY, 0.5), r"a BlockPolicy\(...\), got float"),
        (partial(kept_blocks, QUERY, KEY, VISITED, 4, 4), "got VisitedBlocks"),
    ],
)  # fmt: skip
def test_refuses_arguments_of_other_types(wrong: Callable[[], Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        wrong()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("keep=0", "keep must be more than 0 and at most 1, got 0"),
        ("keep=half", "keep must be a number, or one for each query head"),
        ("keep=0.5,mass=0.5", "give exactly one of keep, mass and window"),
        ("window=1x1", "window must be FRAMESxROWSxCOLUMNS, such as 13x30x45, got '1x1'"),
        ("window=1x1x1", "window needs a grid"),
    ],
)
def test_refuses_options_without_a_meaning(options: str, reason: str) -> None:
    with pytest.raises(KernelNameError, match=reason):
        find(f"{NAME}[{options}]")


@pytest.mark.parametrize(
    ("options", "fields", "reason"),
    [
        ("", {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "takes no attn_mask"),
        ("[keep=1/1/1]", {}, "3 shares for 2 query heads"),
        ("[window=1x1x1,grid=2x2x5]", {}, "this call has 8 queries and 8 keys"),
        ("[window=1x1x1,grid=1x2x2]", {"is_causal": True}, "takes no causal calls"),
    ],
)
def test_refuses_calls_in_a_sentence(options: str, fields: dict[str, Any], reason: str) -> None:
    kernel = find(NAME + options)
    call = random_call(q_heads=2, kv_heads=2, q_len=8, kv_len=8, dtype=torch.float16, **fields)
    assert reason in str(kernel.refuses(call))
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        kernel.attention(**call.arguments())
