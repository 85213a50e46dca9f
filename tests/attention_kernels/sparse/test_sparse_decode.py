"""The tokens with the highest scores are chosen, and decoding attends only to chosen tokens."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.decode.paging import page
from attention_kernels.sparse.sparse_decode import paged_sparse_decode, sparse_decode
from attention_kernels.sparse.token_choice import choose_paged_tokens, choose_tokens
from capture.call.attention_call import AttentionCall
from replay.accuracy.sparse import kept_share, restricted
from replay.kernels.chosen_keys import mask_of_tokens
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, assert_near, verify
from tests.attention_kernels.eager import attend, scores

NAMES = ["triton-sparse-decode", "triton-paged-sparse-decode"]


def call_of(
    batch: int = 2, q_len: int = 1, kv_len: int = 90, lengths: list[int] | None = None
) -> AttentionCall:
    """Return a call whose keys are padded on the left to these lengths."""
    sizes = {"batch": batch, "q_heads": 4, "kv_heads": 2, "v_head_dim": 24}
    call = calls.call_of(q_len, kv_len, 40, **sizes)
    if lengths is None:
        return call
    is_key = torch.arange(kv_len, device=DEVICE) >= kv_len - calls.lengths(*lengths)[:, None]
    return replace(call, attn_mask=is_key[:, None, None])


def best_tokens(call: AttentionCall, count: int) -> Tensor:
    """Return each key head's tokens with the highest scores in float64, (B, Hkv, count)."""
    score = scores(call.query, call.key, call.attn_mask, scale=call.scale)
    by_head = score.unflatten(1, (call.shape.kv_heads, -1)).amax(dim=(2, 3))
    return by_head.topk(count, dim=2).indices


@pytest.mark.parametrize("q_len", [1, 12])
@pytest.mark.parametrize("scale", [None, -0.1])
def test_the_highest_scoring_tokens_are_chosen(q_len: int, scale: float | None) -> None:
    call = call_of(q_len=q_len)
    call = AttentionCall(call.query, call.key, call.value, scale=scale)
    indices = choose_tokens(call.query, call.key, 0.1, scale=scale)
    assert indices.shape == (2, 2, 9)
    assert torch.equal(indices.sort(dim=2).values, best_tokens(call, 9).sort(dim=2).values)


@pytest.mark.parametrize(("keep", "count"), [(1e-6, 1), (0.02, 2), (0.5, 45), (1.0, 90)])
def test_how_many_are_kept(keep: float, count: int) -> None:
    call = call_of()
    indices = choose_tokens(call.query, call.key, keep)
    assert indices.shape[2] == count
    mask = mask_of_tokens(indices, call)
    assert (mask.sum(dim=3) == count).all()
    assert kept_share(call, restricted(call, mask)) == pytest.approx(count / 90)


def test_a_short_sequence_keeps_a_share_of_its_own_tokens() -> None:
    call = call_of(3, lengths=[90, 1, 40])
    indices = choose_tokens(call.query, call.key, 0.1, allowed=call.attn_mask[:, 0, 0])
    assert (indices >= 0).sum(dim=2).tolist() == [[9, 9], [1, 1], [4, 4]]
    assert (indices[1] == -1).sum() == 16
    mask = mask_of_tokens(indices, call)
    assert not (mask & ~call.attn_mask).any()


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 10))
@settings(max_examples=15, deadline=None)
def test_attention_is_to_the_given_tokens(kv_len: int, count: int, seed: int) -> None:
    """All other tokens are NaN, both in a contiguous cache and in pages."""
    generator = torch.Generator().manual_seed(seed)
    call = call_of(kv_len=kv_len, q_len=2)
    order = torch.rand(2, 2, kv_len, generator=generator).argsort(dim=2)[..., :count]
    indices = torch.nn.functional.pad(order, (0, 2), value=-1).to(DEVICE, torch.int32)
    indices[..., -1] = kv_len + 5  # an index beyond the keys is skipped like a negative one
    mask = mask_of_tokens(indices, call)
    expected = attend(call.query, call.key, call.value, mask).output
    unread = ~mask.unflatten(1, (2, 2)).any(dim=2)[:, :, 0, :, None]
    key, value = (each.masked_fill(unread, math.nan) for each in (call.key, call.value))
    cache = page(key, value, 16)
    outputs = (
        sparse_decode(call.query, key, value, indices),
        sparse_decode(call.query, key, value, indices.long()),
        paged_sparse_decode(call.query, *cache, indices),
    )
    for output in outputs:
        assert_near(output, expected)


def test_without_a_token_the_output_is_zeros() -> None:
    call = call_of()
    nothing = torch.full((2, 2, 3), -1, dtype=torch.int32, device=DEVICE)
    assert not sparse_decode(call.query, call.key, call.value, nothing).any()


def test_pages_are_chosen_from_as_one_piece_is() -> None:
    call = call_of()
    cache = page(call.key, call.value, 16)
    paged = choose_paged_tokens(call.query, cache.key_pages, cache.block_table, cache.lengths, 0.1)
    one_piece = choose_tokens(call.query, call.key, 0.1)
    assert torch.equal(mask_of_tokens(paged, call), mask_of_tokens(one_piece, call))


@pytest.mark.parametrize("options", ["", "[keep=0.3]", "[keep=1]"])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels(name: str, options: str) -> None:
    assert find(name).accuracy_class == "sparse"
    for call in (call_of(), call_of(3, 2, lengths=[90, 1, 40])):
        verify(name + options, call)
