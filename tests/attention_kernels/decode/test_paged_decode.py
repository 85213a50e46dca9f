"""Decoding with keys in pages reads only tokens that the page table names."""

import math

import pytest
import torch

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.paging import PagedCache, page
from attention_kernels.decode.split_kv import PackedQueries, attend_to_cache
from attention_kernels.decode.split_kv_assignment import KeyAssignment
from attention_kernels.decode.split_kv_plan import Tiling
from attention_kernels.options import AttentionOptions
from attention_kernels.portable.paged_prefill import paged_prefill
from capture.call.attention_call import AttentionCall
from replay.kernels.constraints import padding_mask_only
from tests.attention_kernels.calls import (
    DEVICE,
    assert_near,
    call_of,
    half,
    lengths,
    offsets,
    verify,
)
from tests.attention_kernels.eager import attend


def padded_call(given: list[int], kv_len: int, at_end: bool) -> AttentionCall:
    """Return a call with padding keys at the end or at the beginning."""
    sizes = {"batch": len(given), "q_heads": 4, "kv_heads": 2, "v_head_dim": 24}
    places, counted = torch.arange(kv_len, device=DEVICE), lengths(*given)[:, None]
    is_key = places < counted if at_end else places >= kv_len - counted
    return call_of(1, kv_len, 40, attn_mask=is_key[:, None, None], **sizes)


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


Q_LENS, K_LENS, MOST = (1, 3, 0, 5, 1, 2), (40, 17, 9, 30, 100, 2), 3
ASSIGNED = KeyAssignment(shares=8, resident=6, least=1, worth=1e9)


@pytest.mark.parametrize(("heads", "page_size"), [(4, 5), (70, 16)])
@pytest.mark.parametrize("tiles", [Tiling(16, 4, 1, 3), Tiling(16, 4, 1, 1, ASSIGNED)])
def test_sequences_are_shared_by_two_kernels(tiles: Tiling, heads: int, page_size: int) -> None:
    """The decode kernel computes short sequences, and the prefill kernel the others. Neither
    touches the other's rows nor reads slots without a token.

    With 70 heads, two blocks of rows share the keys, and each has its own counters.
    """
    query, key = half(sum(Q_LENS), heads, 48), half(len(Q_LENS), 1, max(K_LENS), 48, seed=1)
    pages = poisoned(page(key, key[..., :32], page_size, lengths=lengths(*K_LENS)))
    pages = pages._replace(value_pages=pages.key_pages[..., :32])
    starts, options = offsets(*Q_LENS), AttentionOptions(bottom_right=True)
    decoded, prefilled = (
        torch.full((*query.shape[:2], 32), math.nan, dtype=query.dtype, device=DEVICE)
        for _ in range(2)
    )
    lse = torch.full((heads, len(query)), math.nan, device=DEVICE)
    attend_to_cache(
        query.transpose(0, 1)[None], Cache.in_pages(*pages), is_causal=True, options=options,
        tiles=tiles, packed=PackedQueries(starts, MOST, decoded, lse),
    )  # fmt: skip
    paged_prefill(
        query, *pages, starts, prefilled, None, True, scale=None, key_scale=None, value_scale=None,
        sinks=None, options=options, decoded=MOST,
    )  # fmt: skip
    for element, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        own = slice(sum(Q_LENS[:element]), sum(Q_LENS[: element + 1]))
        tokens = key[element : element + 1, :, :k_len]
        seen = torch.ones(q_len, k_len, dtype=torch.bool, device=DEVICE).tril(k_len - q_len)
        expected = attend(
            query[own].transpose(0, 1)[None], tokens, tokens[..., :32], seen[None, None]
        )
        written, other = (prefilled, decoded) if q_len > MOST else (decoded, prefilled)
        assert_near(written[own].transpose(0, 1), expected.output[0])
        assert other[own].isnan().all()
        if q_len <= MOST:
            assert_near(lse[:, own], expected.lse[0])


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
