"""Decoding with keys in pages reads only tokens that the page table names."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import PagedCache, page
from capture.call.attention_call import AttentionCall
from replay.kernels.constraints import padding_mask_only
from tests.attention_kernels.calls import DEVICE, assert_near, call_of, half, lengths, verify
from tests.attention_kernels.eager import attend


def padded_call(given: list[int], kv_len: int, at_end: bool, q_len: int = 1) -> AttentionCall:
    """Return a call with padding keys at the end or at the beginning."""
    sizes = {"batch": len(given), "q_heads": 4, "kv_heads": 2, "v_head_dim": 24}
    places, counted = torch.arange(kv_len, device=DEVICE), lengths(*given)[:, None]
    is_key = places < counted if at_end else places >= kv_len - counted
    return call_of(q_len, kv_len, 40, attn_mask=is_key[:, None, None], **sizes)


def poisoned(cache: PagedCache) -> PagedCache:
    """Return a cache with NaN in every slot without a token."""
    pages, page_size = cache.key_pages.shape[:2]
    is_used = torch.zeros(pages, page_size, dtype=torch.bool, device=DEVICE)
    for sequence, length in enumerate(cache.lengths.tolist()):
        for token in range(length):
            place = int(cache.block_table[sequence, token // page_size])
            is_used[place, token % page_size] = True
    unused = ~is_used[:, :, None, None]
    return cache._replace(
        key_pages=cache.key_pages.masked_fill(unused, math.nan),
        value_pages=cache.value_pages.masked_fill(unused, math.nan),
    )


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(0, 5),
    st.sampled_from([1, 5, 16, 64]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_only_tokens_are_read(lengths: list[int], more: int, page_size: int, at_end: bool) -> None:
    call = padded_call(lengths, max(lengths) + more, at_end, q_len=2)
    keys = call.attn_mask[:, 0, 0] if call.attn_mask is not None else torch.empty(0)
    cache = page(
        call.key, call.value, page_size, lengths=keys.sum(dim=1), starts=keys.int().argmax(dim=1)
    )
    output = paged_decode(call.query, *poisoned(cache))
    assert_near(output, attend(call.query, call.key, call.value, call.attn_mask).output)


def test_pages_are_out_of_order_and_the_same_each_time() -> None:
    key, value = half(2, 2, 100, 8), half(2, 2, 100, 8, seed=1)
    cache = page(key, value, 16)
    assert cache.key_pages.shape == (14, 16, 2, 8)
    assert cache.lengths.tolist() == [100, 100]
    order = cache.block_table.flatten().tolist()
    assert sorted(order) == list(range(14))
    assert order != sorted(order)
    assert torch.equal(cache.block_table, page(key, value, 16).block_table)
    assert not torch.equal(cache.block_table, page(key, value, 16, seed=1).block_table)
    token = cache.key_pages[cache.block_table[1, 50 // 16], 50 % 16]
    assert torch.equal(token, key[1, :, 50])


@pytest.mark.parametrize("name", ["triton-paged-decode", "triton-paged-decode[page_size=7]"])
@pytest.mark.parametrize("at_end", [True, False])
def test_the_kernel_on_padded_batches(name: str, at_end: bool) -> None:
    call = padded_call([50, 1, 23], 50, at_end)
    assert padding_mask_only(call) is None
    verify(name, call)
    verify(name, AttentionCall(call.query, call.key, call.value, enable_gqa=True))
