"""In batches of different lengths, each sequence is computed as if it were alone."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.portable.varlen import KeyRanges, key_ranges, packed_prefill, padded_prefill
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import catalogue
from tests.attention_kernels.calls import DEVICE, LOADS, assert_near, assert_right, half, offsets
from tests.attention_kernels.eager import attend
from tests.replay.kernels.pairwise import pairwise


def assert_packed(
    q_lengths: list[int],
    k_lengths: list[int],
    head_dim: int = 64,
    group: int = 2,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float16,
) -> None:
    query = half(sum(q_lengths), 2 * group, head_dim, dtype=dtype)
    key, value = (half(sum(k_lengths), 2, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    at_q, at_k = offsets(*q_lengths), offsets(*k_lengths)
    output, lse = packed_prefill(
        query, key, value, at_q, at_k, max(q_lengths, default=0), is_causal, return_lse=True
    )
    for element in range(len(q_lengths)):
        own_q = slice(int(at_q[element]), int(at_q[element + 1]))
        own_k = slice(int(at_k[element]), int(at_k[element + 1]))
        alone = (query[own_q], key[own_k], value[own_k])
        expected = attend(*(each.transpose(0, 1)[None] for each in alone), None, is_causal)
        assert_near(output[own_q].transpose(0, 1)[None], expected.output)
        torch.testing.assert_close(lse[None, :, own_q].double(), expected.lse, rtol=1e-4, atol=2e-4)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "size"),
    pairwise(product([64, 72], [False, True], LOADS)),
    indirect=["size"],
)
def test_packed(is_causal: bool, head_dim: int) -> None:
    assert_packed([7, 130, 1, 64], [130, 5, 1, 200], head_dim, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packed_dtypes(dtype: torch.dtype) -> None:
    assert_packed([127, 7], [127, 7], dtype=dtype, is_causal=True)


def test_packed_elements_without_queries_or_keys() -> None:
    assert_packed([0, 3, 4], [5, 0, 130])
    assert_packed([], [])


@pytest.mark.usefixtures("size")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_packed_batch(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 140), st.integers(0, 140)), min_size=1, max_size=3)
    )
    assert_packed(
        [queries for queries, _ in lengths],
        [keys for _, keys in lengths],
        data.draw(st.sampled_from([40, 64, 128])),
        1,
        data.draw(st.booleans()),
    )


def padding(ranges: list[tuple[int, int]], length: int) -> Tensor:
    """Return a (B, Sk) bool tensor that is True for valid keys, given their ranges."""
    places = torch.arange(length)
    rows = [(places >= first) & (places < first + count) for first, count in ranges]
    return torch.stack(rows).to(DEVICE)


def assert_padded(
    ranges: list[tuple[int, int]], length: int, head_dim: int = 64, is_causal: bool = False
) -> None:
    """Check a padded batch with NaN in the padding, which must not be read."""
    query = half(len(ranges), 2, 50, head_dim)
    key, value = (half(len(ranges), 1, length, head_dim, seed=seed) for seed in (1, 2))
    keys = padding(ranges, length)
    expected = attend(query, key, value, keys[:, None, None], is_causal)
    for each in (key, value):
        each.masked_fill_(~keys[:, None, :, None], math.nan)
    output, lse = padded_prefill(query, key, value, key_ranges(keys), is_causal, return_lse=True)
    assert_near(output, expected.output)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=2e-4)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "size"),
    pairwise(product([64, 80], [False, True], LOADS)),
    indirect=["size"],
)
def test_padded(is_causal: bool, head_dim: int) -> None:
    ranges = [(0, 130), (70, 130), (199, 1), (0, 200), (30, 100), (0, 0)]
    assert_padded(ranges, 200, head_dim, is_causal)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_padded_batch(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 200))
    ends = st.tuples(st.integers(0, length), st.integers(0, length))
    drawn = data.draw(st.lists(ends, min_size=1, max_size=3))
    ranges = [(min(pair), abs(pair[0] - pair[1])) for pair in drawn]
    head_dim = data.draw(st.sampled_from([40, 64, 128]))
    assert_padded(ranges, length, head_dim, data.draw(st.booleans()))


def test_key_ranges() -> None:
    ranges = [(0, 5), (2500, 500), (2999, 1), (0, 3000), (0, 0), (1020, 10)]
    keys = padding(ranges, 3000)
    for each in (keys, keys.mT.contiguous().mT, keys[:1].expand(3, 3000)):
        found = key_ranges(each)
        assert found.starts is not None
        assert found.starts.dtype == found.lengths.dtype == torch.int32
        expected = ranges[: len(each)] if each.stride(0) else ranges[:1] * 3
        pairs = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        assert list(pairs) == expected
    assert key_ranges(keys[:0]).lengths.shape == (0,)


def call_of(mask: Tensor | None, **fields: Any) -> AttentionCall:
    query, key, value = (half(2, heads, 70, 64, seed=heads) for heads in (4, 2, 2))
    return AttentionCall(query, key, value, attn_mask=mask, enable_gqa=True, **fields)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_drop_in_and_its_core(is_causal: bool, shared: bool) -> None:
    keys = padding([(0, 50), (30, 40)], 70)
    mask = keys[0] if shared else keys[:, None, None].expand(2, 4, 70, 70)
    call = call_of(mask, is_causal=is_causal, scale=0.2)
    kernel = catalogue()["triton-varlen"]
    assert kernel.unsupported(call) is None
    assert kernel.prepare is not None
    reference = attend(call.query, call.key, call.value, mask, is_causal, 0.2).output
    assert_right(kernel.attention(**call.arguments()), reference, call)
    assert_right(kernel.prepare(call)(), reference, call)


def test_ranges_can_be_a_models_own() -> None:
    query, key, value = (half(2, 2, 40, 64, seed=seed) for seed in range(3))
    starts, lengths = (
        torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 4], [9, 30])
    )
    for first, ranges in ((starts, [(0, 9), (4, 30)]), (None, [(0, 9), (0, 30)])):
        output = padded_prefill(query, key, value, KeyRanges(first, lengths))
        mask = padding(ranges, 40)[:, None, None]
        expected = attend(query, key, value, mask).output
        assert_near(output, expected)
