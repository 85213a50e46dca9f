"""Decoding returns the log-sum-exp of each row, whichever way the cache is read and merged."""

import math

import pytest
import torch
from torch import Tensor

from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import page
from attention_kernels.decode.quantised_cache import quantise_cache
from attention_kernels.decode.split_kv import attend_to_cache
from tests.attention_kernels.calls import DEVICE, half, lengths
from tests.attention_kernels.eager import attend


def tensors(kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    return half(2, 4, 3, 64), half(2, 2, kv_len, 64, seed=1), half(2, 2, kv_len, 32, seed=2)


@pytest.mark.parametrize("kv_len", [5, 700], ids=["one part", "merged parts"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_contiguous_decode_returns_log_sum_exp(kv_len: int, has_sinks: bool) -> None:
    query, key, value = tensors(kv_len)
    mask = torch.ones(3, kv_len, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    mask[1, ::2] = False
    sinks = half(4, seed=3) if has_sinks else None
    output, lse = contiguous_decode(query, key, value, mask, sinks=sinks, return_lse=True)
    expected = attend(query, key, value, mask).lse
    if sinks is not None:
        expected = torch.logaddexp(expected, sinks.double()[:, None])
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(output, contiguous_decode(query, key, value, mask, sinks=sinks))


def test_paged_decode_returns_log_sum_exp() -> None:
    query, key, value = tensors(700)
    lse = paged_decode(query, *page(key, value, 16, lengths=lengths(700, 0)), return_lse=True)[1]
    expected = attend(query, key, value).lse
    expected[1] = -math.inf
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kv_len", [100, 700], ids=["one part", "merged parts"])
def test_decode_in_8_bits_returns_log_sum_exp(dtype: torch.dtype, kv_len: int) -> None:
    query, key, value = tensors(kv_len)
    _, lse = attend_to_cache(query, quantise_cache(key, value, dtype), return_lse=True)
    torch.testing.assert_close(lse.double(), attend(query, key, value).lse, rtol=0.0, atol=0.05)


def test_log_sum_exp_of_no_query_is_empty() -> None:
    query, key, value = half(2, 4, 0, 64), half(2, 2, 5, 64), half(2, 2, 5, 32)
    output, lse = attend_to_cache(query, Cache(key, value), return_lse=True)
    assert (output.shape, lse.shape) == ((2, 4, 0, 32), (2, 4, 0))
