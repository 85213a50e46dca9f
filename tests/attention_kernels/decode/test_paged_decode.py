"""Decoding with keys in pages: only tokens named by a page table are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import PagedCache, page
from capture.call.attention_call import AttentionCall
from replay.kernels.constraints import padding_mask_only
from replay.kernels.registry import find
from tests import factories
from tests.attention_kernels.eager import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

normal = functools.partial(factories.normal, dtype=torch.float16, device=DEVICE)


def padded_call(lengths: list[int], kv_len: int, at_end: bool, q_len: int = 1) -> AttentionCall:
    """Return a call with padding keys at the end or at the beginning."""
    batch = len(lengths)
    place = torch.arange(kv_len, device=DEVICE)
    counted = torch.tensor(lengths, device=DEVICE)[:, None]
    keys = place < counted if at_end else place >= kv_len - counted
    return AttentionCall(
        normal(batch, 4, q_len, 40),
        normal(batch, 2, kv_len, 40, seed=1),
        normal(batch, 2, kv_len, 24, seed=2),
        keys[:, None, None],
        enable_gqa=True,
    )


def expected_of(call: AttentionCall) -> Tensor:
    return attend(call.query, call.key, call.value, call.attn_mask).output


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
    torch.testing.assert_close(output.double(), expected_of(call), rtol=0, atol=3e-3)


def test_pages_are_out_of_order_and_the_same_each_time() -> None:
    key, value = normal(2, 2, 100, 8), normal(2, 2, 100, 8, seed=1)
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


def test_a_sequence_without_tokens_gets_zeros() -> None:
    cache = page(normal(2, 2, 20, 32), normal(2, 2, 20, 32), 16)
    cache = cache._replace(lengths=torch.tensor([20, 0], dtype=torch.int32, device=DEVICE))
    output = paged_decode(normal(2, 2, 1, 32), *poisoned(cache))
    assert output[0].isfinite().all()
    assert not output[1].any()


@pytest.mark.parametrize("name", ["triton-paged-decode", "triton-paged-decode[page_size=7]"])
@pytest.mark.parametrize("at_end", [True, False])
def test_the_kernel_on_padded_batches(
    name: str, at_end: bool, assert_right: Callable[..., None]
) -> None:
    kernel = find(name)
    call = padded_call([50, 1, 23], 50, at_end)
    assert padding_mask_only(call) is None
    assert kernel.prepare is not None
    for output in (kernel.attention(**call.arguments()), kernel.prepare(call)()):
        assert_right(output, expected_of(call), call)
    plain = AttentionCall(call.query, call.key, call.value)
    for output in (kernel.attention(**plain.arguments()), kernel.prepare(plain)()):
        assert_right(output, expected_of(plain), plain)
