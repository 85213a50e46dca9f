"""Keys and values in 8 bits are near the originals, and no other memory is written."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.quantised.quantise import (
    GROUP,
    KEY_ORDER,
    QuantisedKeyValue,
    launch_of,
    quantise_key_value,
)
from tests.attention_kernels.calls import DEVICE

FP8 = torch.float8_e4m3fn
ROUNDING = {torch.int8: 0.5 / 127, FP8: 16 / 448}
"""Largest rounding error as a fraction of a group's largest number."""


def dequantised_key(quantised: QuantisedKeyValue, head_dim: int) -> Tensor:
    """Return the keys as (B, Hkv, Sk, D) float32; a subtracted mean is not added back."""
    groups = quantised.key.float().unflatten(2, (-1, GROUP))
    key = (groups * quantised.key_scale[..., None, None]).flatten(2, 3)
    return key[:, :, : quantised.kv_len, :head_dim]


def dequantised_value(quantised: QuantisedKeyValue) -> Tensor:
    """Return the values as (B, Hkv, Sk, Dv) float32."""
    if quantised.value_scale is None:
        return quantised.value.float()
    stored = quantised.value.float().unflatten(3, (-1, GROUP))
    stored = (stored * quantised.value_scale[:, :, None, :, None]).unflatten(4, (-1, 16))
    value = torch.empty_like(stored)
    value[..., list(KEY_ORDER)] = stored
    return value.flatten(3).mT[:, :, : quantised.kv_len, : quantised.v_head_dim]


def largest_by_group(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in every `GROUP` positions, (B, H, groups)."""
    short = -tensor.shape[2] % GROUP
    padded = torch.nn.functional.pad(tensor.float().abs(), (0, 0, 0, short))
    return padded.unflatten(2, (-1, GROUP)).amax(dim=(3, 4))


def by_position(groups: Tensor, length: int) -> Tensor:
    return groups.repeat_interleave(GROUP, dim=2)[:, :, :length, None]


def sampled(length: int) -> list[int]:
    """Return the sampled positions: one in each 64th of the sequence, 39/64 further in each."""
    return [(part * 64 + part * 39 % 64) * length // 4096 for part in range(64)]


def check(key: Tensor, value: Tensor, key_dtype: torch.dtype, smooth_k: bool) -> QuantisedKeyValue:
    before = key.clone(), value.clone()
    quantised = quantise_key_value(key, value, key_dtype, True, smooth_k)
    torch.testing.assert_close((key, value), before, rtol=0, atol=0)
    length, head_dim = key.shape[2:]
    mean = key.float()[:, :, sampled(length)].mean(dim=2, keepdim=True)
    wanted = key.float() - mean if smooth_k else key.float()
    allowed = by_position(largest_by_group(wanted), length) * ROUNDING[key_dtype] * 1.01 + 1e-5
    assert bool(((dequantised_key(quantised, head_dim) - wanted).abs() <= allowed).all())
    allowed = by_position(largest_by_group(value), length) * ROUNDING[FP8] * 1.01
    assert bool(((dequantised_value(quantised) - value.float()).abs() <= allowed).all())
    assert not quantised.key.float()[:, :, length:].any()
    assert not quantised.key.float()[..., head_dim:].any()
    assert not quantised.value.float()[:, :, value.shape[3] :].any()
    return quantised


def random(*shape: int, seed: int = 0, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + offset).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("key_dtype", [torch.int8, FP8])
def test_numbers_come_back(key_dtype: torch.dtype, smooth_k: bool) -> None:
    key = random(2, 3, 300, 80, offset=3)
    value = random(2, 300, 3, 96).transpose(1, 2)
    quantised = check(key, value, key_dtype, smooth_k)
    assert quantised.key.shape == (2, 3, 384, 128)
    assert quantised.value.shape == (2, 3, 128, 384)
    assert quantised.key_scale.shape == (2, 3, 3)


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 3),
    length=st.integers(1, 2 * GROUP + 5),
    head_dim=st.integers(1, 72),
    transposed=st.booleans(),
    smooth_k=st.booleans(),
    exponent=st.integers(-20, 10),
)
def test_any_shape_stride_and_magnitude(
    heads: int, length: int, head_dim: int, transposed: bool, smooth_k: bool, exponent: int
) -> None:
    key = random(1, heads, length, head_dim, seed=length) * 2.0**exponent
    if transposed:
        key = key.mT.contiguous().mT
    value = random(1, heads, length, 2 * head_dim, seed=heads)[..., ::2]
    check(key, value, torch.int8, smooth_k)


def test_a_pattern_that_recurs_does_not_mislead_the_sample() -> None:
    """One key in 32 is an outlier, like an image's column; samples must not all be outliers."""
    key = random(1, 1, 4096, 64)
    key[:, :, ::32] += 100
    quantised = quantise_key_value(key, key)
    subtracted = key.float() - dequantised_key(quantised, 64)
    assert float(subtracted.mean(dim=2).abs().max()) < 10, "the mean of all is 100 / 32"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_int8_group_nan(bad: float) -> None:
    inside = next(row for row in sampled(300) if 128 <= row < 256)
    outside = next(row for row in range(128, 256) if row not in sampled(300))
    for row, smooth_k in ((inside, False), (outside, False), (outside, True)):
        key = random(1, 2, 300, 64)
        key[0, 1, row, 5] = bad
        scale = quantise_key_value(key, key, smooth_k=smooth_k).key_scale
        assert scale.isnan().tolist() == [[[False] * 3, [False, True, False]]]
    key = random(1, 2, 300, 64)
    key[0, 1, inside, 5] = bad
    scale = quantise_key_value(key, key, smooth_k=True).key_scale
    assert scale.isnan().tolist() == [[[False] * 3, [True] * 3]]


def test_plans_depend_on_both_types() -> None:
    """A program compiled for one type would misread tensors of the other."""
    key, value = torch.zeros(2, 1, 1, 8, 32, dtype=torch.float16).unbind()
    options = (torch.int8, True, True, False)
    assert launch_of(key, value, *options) is launch_of(key.clone(), value, *options)
    for others in ((key.bfloat16(), value), (key, value.bfloat16()), (key, value.to("meta"))):
        assert launch_of(*others, *options) is not launch_of(key, value, *options)
