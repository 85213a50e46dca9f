"""Decoding works if the value is the first part of the key: DeepSeek's absorbed attention."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import split_kv
from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import page
from attention_kernels.decode.split_kv import attend_to_cache
from attention_kernels.decode.split_kv_plan import Tiling, merging, plan
from attention_kernels.operators import attention
from attention_kernels.options import AttentionOptions
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import find
from tests.attention_kernels import eager
from tests.attention_kernels.calls import assert_near, half, lengths, watched_rooms


def inputs(
    heads: int, latent: int, tail: int, *, q_len: int = 1, kv_len: int = 150
) -> tuple[Tensor, Tensor, Tensor]:
    key = half(2, 1, kv_len, latent + tail, seed=1)
    return half(2, heads, q_len, latent + tail), key, key[..., :latent]


@pytest.mark.parametrize(
    ("heads", "latent", "tail"),
    [(16, 64, 16), (20, 32, 64), (1, 40, 24), (70, 16, 3), (16, 512, 64)],
)
def test_in_one_piece_and_in_pages(heads: int, latent: int, tail: int) -> None:
    query, key, value = inputs(heads, latent, tail)
    expected = eager.attend(query, key, value).output
    assert_near(contiguous_decode(query, key, value), expected)
    cache = page(key, value, 16)
    assert cache.value_pages.data_ptr() == cache.key_pages.data_ptr()
    assert_near(paged_decode(query, *cache), expected)


def test_what_follows_a_sequence_is_not_read() -> None:
    query, key, value = inputs(4, 32, 16)
    key[1, :, 33:] = math.nan
    output = contiguous_decode(query, key, value, seqused_k=lengths(150, 33))
    for i, length in enumerate((150, 33)):
        own = slice(i, i + 1)
        seen = eager.attend(query[own], key[own, :, :length], value[own, :, :length])
        assert_near(output[own], seen.output)


def test_some_queries_a_diagonal_and_a_soft_cap() -> None:
    query, key, value = inputs(4, 32, 16, q_len=3)
    options = AttentionOptions(bottom_right=True, softcap=5.0)
    output = contiguous_decode(query, key, value, is_causal=True, options=options)
    separate = contiguous_decode(query, key, value.clone(), is_causal=True, options=options)
    torch.testing.assert_close(output, separate, rtol=0, atol=2e-3)


@pytest.mark.parametrize("processors", [4, 6])
def test_many_rows_are_merged_in_parts(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three programs merges, or all programs if they run at once. Interpreted programs
    run in sequence, so the last one merges all."""
    monkeypatch.setattr(split_kv, "_processors", lambda device: processors)
    rooms = watched_rooms(monkeypatch)
    query, key, value = inputs(64, 512, 64, kv_len=100 + processors)
    tiles = Tiling(32, 8, 3, splits=3)
    cut = plan(2, 64, 100 + processors, 576, 512, "direct", processors, tail=64)
    found = merging(cut, tiles, 2, 64, processors)
    assert (found.row_chunks > 1, found.together) == (True, processors == 6)
    output = attend_to_cache(query, Cache(key, value), tiles=tiles)
    assert_near(output, eager.attend(query, key, value).output)
    ((_, counters),) = rooms
    assert not counters.any()


@pytest.mark.parametrize("run", [contiguous_decode, partial(attention, enable_gqa=True)])
def test_plans_depend_on_where_the_value_is(run: Callable[..., Tensor]) -> None:
    query, key, value = inputs(4, 32, 16)
    other = half(2, 1, 150, 48, seed=3)[..., :32]  # equal strides, but other memory
    for each in (value, other, other.contiguous(), value):
        assert_near(run(query, key, each), eager.attend(query, key, each).output)


@pytest.mark.parametrize("name", ["triton-decode", "triton-paged-decode"])
def test_how_large_the_parts_may_be(name: str) -> None:
    kernel = find(name)

    def refused(latent: int, tail: int, *, is_shared: bool = True) -> str:
        query, key, value = inputs(4, latent, tail, kv_len=8)
        value = value if is_shared else value.clone()
        return kernel.unsupported(AttentionCall(query, key, value, enable_gqa=True)) or ""

    assert not refused(512, 64)
    assert "512 + 128" in refused(512, 144)
    assert "512 + 128" in refused(576, 64)
    assert "at most 256" in refused(512, 64, is_shared=False)
