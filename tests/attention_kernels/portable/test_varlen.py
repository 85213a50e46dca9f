"""In batches of different lengths, each sequence is computed as if it were alone."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.portable.varlen import key_ranges, packed_prefill, padded_prefill
from replay.kernels.registry import catalogue
from tests.attention_kernels.calls import DEVICE, assert_near, assert_right, call_of, half, offsets
from tests.attention_kernels.eager import attend


@pytest.mark.usefixtures("size")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 140), st.integers(0, 140)), max_size=3),
    head_dim=st.sampled_from([40, 64, 128]),
    is_causal=st.booleans(),
)
@example(lengths=[(7, 130), (130, 5), (1, 1), (64, 200)], head_dim=72, is_causal=True)
@example(lengths=[(0, 5), (3, 0), (4, 130)], head_dim=64, is_causal=False)
@example(lengths=[], head_dim=64, is_causal=False)
def test_any_packed_batch(lengths: list[tuple[int, int]], head_dim: int, is_causal: bool) -> None:
    q_lengths, k_lengths = ([pair[at] for pair in lengths] for at in (0, 1))
    query = half(sum(q_lengths), 4, head_dim)
    key, value = (half(sum(k_lengths), 2, head_dim, seed=seed) for seed in (1, 2))
    at_q, at_k = offsets(*q_lengths), offsets(*k_lengths)
    output, lse = packed_prefill(
        query, key, value, at_q, at_k, max(q_lengths, default=0), is_causal, return_lse=True
    )
    for element in range(len(lengths)):
        own_q = slice(int(at_q[element]), int(at_q[element + 1]))
        own_k = slice(int(at_k[element]), int(at_k[element + 1]))
        alone = (query[own_q], key[own_k], value[own_k])
        expected = attend(*(each.transpose(0, 1)[None] for each in alone), None, is_causal)
        assert_near(output[own_q].transpose(0, 1)[None], expected.output)
        torch.testing.assert_close(lse[None, :, own_q].double(), expected.lse, rtol=1e-4, atol=2e-4)


def padding(ranges: list[tuple[int, int]], length: int) -> Tensor:
    """Return a (B, Sk) bool tensor that is True for valid keys, given their ranges."""
    places = torch.arange(length)
    rows = [(places >= first) & (places < first + count) for first, count in ranges]
    return torch.stack(rows).to(DEVICE)


@pytest.mark.usefixtures("size")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    ends=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=3),
    head_dim=st.sampled_from([40, 64, 128]),
    is_causal=st.booleans(),
)
@example(ends=[(0, 130), (70, 200), (199, 200), (0, 200), (9, 9)], head_dim=80, is_causal=True)
def test_any_padded_batch(ends: list[tuple[int, int]], head_dim: int, is_causal: bool) -> None:
    ranges = [(min(pair), abs(pair[0] - pair[1])) for pair in ends]
    length = max(1, *map(max, ends))
    query = half(len(ranges), 2, 50, head_dim)
    key, value = (half(len(ranges), 1, length, head_dim, seed=seed) for seed in (1, 2))
    keys = padding(ranges, length)
    expected = attend(query, key, value, keys[:, None, None], is_causal)
    for each in (key, value):
        each.masked_fill_(~keys[:, None, :, None], math.nan)
    output, lse = padded_prefill(query, key, value, key_ranges(keys), is_causal, return_lse=True)
    assert_near(output, expected.output)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=2e-4)


def test_key_ranges() -> None:
    ranges = [(0, 5), (2500, 500), (2999, 1), (0, 3000), (0, 0), (1020, 10)]
    keys = padding(ranges, 3000)
    for each in (keys, keys.mT.contiguous().mT, keys[:1].expand(3, 3000)):
        found = key_ranges(each)
        assert found.starts.dtype == found.lengths.dtype == torch.int32
        expected = ranges[: len(each)] if each.stride(0) else ranges[:1] * 3
        pairs = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        assert list(pairs) == expected
    assert key_ranges(keys[:0]).lengths.shape == (0,)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_drop_in_and_its_core(is_causal: bool, shared: bool) -> None:
    keys = padding([(0, 50), (30, 40)], 70)
    mask = keys[0] if shared else keys[:, None, None].expand(2, 4, 70, 70)
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "scale": 0.2}
    call = call_of(70, 70, attn_mask=mask, is_causal=is_causal, **sizes)
    kernel = catalogue()["triton-varlen"]
    assert kernel.unsupported(call) is None
    reference = attend(call.query, call.key, call.value, mask, is_causal, 0.2).output
    assert_right(kernel.attention(**call.arguments()), reference, call)
    assert_right(kernel.prepare(call)(), reference, call)
