"""Compiled prefill and variable-length kernels are right on shapes of real models.

Each combination of head_dim, type, mask and causality is a separate program that takes seconds to
compile, so only some combinations are tested.
"""

import functools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from replay.kernels.registry import catalogue
from tests.attention_kernels.calls import verify
from tests.factories import sized_call

Sizes = tuple[int, int, int, int, int, int, int]
"""(B, Hq, Hkv, Sq, Sk, D, Dv)."""

call_of = functools.partial(sized_call, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(
    ("sizes", "is_causal", "dtype"),
    [
        ((8, 64, 16, 1024, 1024, 64, 64), True, torch.bfloat16),
        ((1, 24, 24, 4608, 4608, 128, 128), False, torch.bfloat16),
        ((1, 32, 8, 4096, 4096, 128, 128), True, torch.bfloat16),
        ((1, 32, 8, 4096, 4096, 128, 128), True, torch.float16),
        ((1, 24, 24, 4250, 4250, 64, 64), False, torch.bfloat16),
        ((1, 24, 24, 4250, 4250, 64, 64), False, torch.float16),
        ((2, 4, 2, 127, 4250, 64, 64), True, torch.bfloat16),
        ((2, 4, 2, 4250, 127, 128, 128), True, torch.float16),
        ((2, 4, 2, 7, 1, 64, 64), False, torch.bfloat16),
        ((2, 4, 2, 1, 7, 256, 256), False, torch.bfloat16),
        ((1, 4, 2, 1000, 1000, 192, 128), True, torch.bfloat16),
        # Calls with few scores are loaded through pointers.
        ((1, 16, 4, 300, 512, 128, 128), True, torch.bfloat16),
        ((2, 16, 16, 77, 77, 64, 64), False, torch.float16),
        ((2, 10, 10, 3000, 77, 64, 128), False, torch.bfloat16),
    ],
)
def test_prefill(sizes: Sizes, is_causal: bool, dtype: torch.dtype) -> None:
    verify("triton-fa2", call_of(sizes, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("lengths", [(1100, 900), (110, 90)])
@pytest.mark.parametrize(
    ("head_dim", "is_causal"), [(40, True), (72, False), (72, True), (80, True), (96, False)]
)
def test_head_dims(head_dim: int, is_causal: bool, lengths: tuple[int, int]) -> None:
    verify("triton-fa2", call_of((1, 4, 2, *lengths, head_dim, head_dim), is_causal=is_causal))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_float32(head_dim: int) -> None:
    sizes = (1, 4, 2, 300, 200, head_dim, head_dim)
    verify("triton-fa2", call_of(sizes, dtype=torch.float32, is_causal=True))


@pytest.mark.parametrize(
    ("head_dim", "shape"),
    [
        (64, (2, 4, 300, 700)),
        (64, (2, 1, 1, 700)),
        (64, (300, 1)),
        (64, (300, 400)),
        (80, (1, 4, 300, 700)),
        (96, (300, 700)),
        (128, (300, 700)),
        (256, (300, 700)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_masks(head_dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = values > 0.3 if dtype == torch.bool else values.to(dtype)
    keys = max(shape[-1], 400)
    verify("triton-fa2", call_of((2, 4, 2, 300, keys, head_dim, head_dim), attn_mask=mask))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_what_is_not_finite(name: str, number: float, head_dim: int) -> None:
    call = call_of((1, 2, 2, 300, 500, head_dim, head_dim))
    getattr(call, name)[0, 0, 5, 7] = number
    output = catalogue()["triton-fa2"].attention(**call.arguments())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = scaled_dot_product_attention(**call.arguments())
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-2, equal_nan=True)


def test_more_elements_than_an_int32_counts() -> None:
    """The memory layout is BSHD, so that rows of a head lie far apart."""
    heads, length, head_dim = 2, 2**18, 64
    stride = 2**14
    memory = torch.zeros(length * stride, dtype=torch.float16, device="cuda")
    view = memory.as_strided((1, heads, length, head_dim), (0, head_dim, stride, 1))
    view.copy_(torch.randn(heads, length, head_dim, device="cuda"))
    query = view[:, :, -128:]
    output = catalogue()["triton-fa2"].attention(query, view, view)
    close = [each.contiguous() for each in (query, view, view)]
    torch.testing.assert_close(output, scaled_dot_product_attention(*close), rtol=0, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_float", [False, True])
def test_what_a_mask_hides_is_skipped(head_dim: int, is_float: bool) -> None:
    """Each head has a window of a different width; the last head sees everything."""
    distance = (
        torch.arange(2100, device="cuda") - torch.arange(1500, device="cuda")[:, None]
    ).abs()
    mask = torch.stack([distance < width for width in (3, 64, 500, 2100)])
    if is_float:
        mask = torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
    verify("triton-masked", call_of((2, 4, 2, 1500, 2100, head_dim, head_dim), attn_mask=mask))


LENGTHS = (1024, 468, 631, 258, 353, 599, 732, 94)


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (72, False), (128, False)])
@pytest.mark.parametrize("is_left", [False, True])
def test_padded(head_dim: int, is_causal: bool, is_left: bool) -> None:
    keys = torch.arange(1024, device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    mask = (keys.flip(1) if is_left else keys)[:, None, None]
    sizes = (8, 16, 4, 1024, 1024, head_dim, head_dim)
    verify("triton-varlen", call_of(sizes, attn_mask=mask, is_causal=is_causal))
