"""The prefill kernel agrees with the textbook formula in float64 on calls of all kinds."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels.portable import forward
from attention_kernels.portable.prefill import prefill
from capture.call.attention_call import AttentionCall
from tests.attention_kernels.calls import DEVICE, LOADS, assert_right, half
from tests.attention_kernels.eager import attend
from tests.factories import sized_call
from tests.replay.kernels.pairwise import each_pair

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
call_of = functools.partial(sized_call, dtype=HALF, device=DEVICE)


def verify(call: AttentionCall) -> None:
    """Judge the output by the limits of exact kernels, and check the log-sum-exp."""
    arguments = (call.query, call.key, call.value, call.attn_mask, call.is_causal)
    output, lse = prefill(*arguments, scale=call.scale, return_lse=True)
    expected = attend(*arguments, call.scale)
    assert_right(output, expected.output, call)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=2e-4)


@each_pair(
    "size", head_dim=[8, 16, 40, 64, 72, 80, 96, 128, 160, 256], is_causal=[False, True], size=LOADS
)
def test_head_dims(head_dim: int, is_causal: bool) -> None:
    verify(call_of((1, 2, 1, 70, 150, head_dim, head_dim), is_causal=is_causal))


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (72, 64), (32, 40)])
def test_value_head_dims(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    verify(call_of((1, 2, 2, 33, 70, head_dim, v_head_dim), dtype=dtype, is_causal=True))


LENGTHS = [1, 7, 127, 200]


@each_pair("size", q_len=LENGTHS, kv_len=[0, *LENGTHS], is_causal=[False, True], size=LOADS)
def test_lengths(q_len: int, kv_len: int, is_causal: bool) -> None:
    verify(call_of((2, 2, 1, q_len, kv_len, 64, 64), dtype=BRAIN, is_causal=is_causal))


@pytest.mark.usefixtures("size")
def test_many_tiles() -> None:
    verify(call_of((1, 1, 1, 700, 150, 64, 64)))
    verify(call_of((1, 1, 1, 150, 700, 72, 72), is_causal=True))


def test_refuses_large_head_dims() -> None:
    wide = half(1, 2, 3, 320)
    with pytest.raises(ValueError, match="head_dim 320: at most 256"):
        prefill(wide, wide, wide)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2, 2.0])
def test_scales(scale: float) -> None:
    verify(call_of((1, 2, 2, 40, 150, 64, 64), scale=scale, is_causal=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BHSD": lambda x: x,
    "BSHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "SBHD": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "D not last": lambda x: x.mT.contiguous().mT,
    "part of a fused tensor": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] :][
        ..., : x.shape[-1]
    ],
    "every other element": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "off the 16-byte grid": lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:],
}

MASKS: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "whole": lambda b, h, m, n: (b, h, m, n),
    "of a batch element": lambda b, h, m, n: (b, 1, m, n),
    "of queries and keys": lambda b, h, m, n: (m, n),
    "of keys": lambda b, h, m, n: (b, 1, 1, n),
    "of keys alone": lambda b, h, m, n: (n,),
    "of queries": lambda b, h, m, n: (1, h, m, 1),
}


def mask_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = half(*shape, dtype=SINGLE, seed=3)
    if dtype == torch.bool:
        return values > 0.3
    return values.masked_fill(values > 1.2, -math.inf).to(dtype)


@each_pair("size", kind=MASKS, of=[(torch.bool, 144), (HALF, 144), (SINGLE, 141)], size=LOADS)
def test_masks(kind: str, of: tuple[torch.dtype, int]) -> None:
    """The length of the mask's rows may or may not be a multiple of 16 bytes."""
    dtype, kv_len = of
    mask = mask_of(MASKS[kind](2, 2, 70, kv_len), dtype)
    verify(call_of((2, 2, 1, 70, kv_len, 64, 64), attn_mask=mask))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_mask_with_others_numbers_behind_its_rows(head_dim: int) -> None:
    around = torch.full((2, 2, 160, 192), math.nan, dtype=HALF, device=DEVICE)
    mask = around[..., :150, :176].copy_(mask_of((2, 2, 150, 176), HALF))
    verify(call_of((2, 2, 1, 150, 176, head_dim, head_dim), attn_mask=mask))


@each_pair("size", layout=LAYOUTS, head_dim=[64, 80], size=LOADS)
def test_strides(layout: str, head_dim: int) -> None:
    call = call_of((2, 2, 2, 70, 140, head_dim, head_dim), is_causal=True)
    verify(call.with_tensors({name: LAYOUTS[layout](x) for name, x in call.tensors().items()}))


def test_a_mask_of_the_lowest_number_is_not_minus_infinity() -> None:
    """A row masked by the lowest number becomes the mean of all values, as in SDPA."""
    mask = torch.zeros(40, 150, dtype=HALF)
    for dtype in (HALF, BRAIN, SINGLE):
        call = call_of((1, 2, 2, 40, 150, 64, 64), dtype=dtype)
        mask = torch.zeros(40, 150, dtype=dtype, device=call.device)
        mask[3] = torch.finfo(dtype).min
        mask[5, 10:] = torch.finfo(dtype).min
        output = prefill(call.query, call.key, call.value, mask)
        expected = attend(call.query, call.key, call.value, mask).output
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)


NOT_FINITE = [math.nan, math.inf, -math.inf]


@each_pair(name=["query", "key", "value", "attn_mask"], number=NOT_FINITE, head_dim=[64, 80])
def test_nonfinite_numbers_spread_as_in_sdpa(name: str, number: float, head_dim: int) -> None:
    call = call_of((1, 2, 2, 40, 150, head_dim, head_dim))
    mask = torch.zeros(1, 1, 40, 150, dtype=HALF, device=call.device)
    mask[..., 100:140] = -math.inf
    call = call.with_tensors({"attn_mask": mask})
    getattr(call, name)[0, 0, 5, 7] = number
    if name in ("key", "value"):
        getattr(call, name)[0, 1, 120, 3] = number  # a key that every query may see
    output = prefill(call.query, call.key, call.value, mask)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(**call.arguments())
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-3, equal_nan=True)


def test_keys_to_the_right_of_the_diagonal_reach_nothing() -> None:
    query, key, value = (half(1, 1, 300, 64, seed=seed) for seed in range(3))
    expected = prefill(query, key, value, is_causal=True)
    key[:, :, 290:] = math.nan
    value[:, :, 290:] = math.nan
    output = prefill(query, key, value, is_causal=True)
    assert torch.equal(output[:, :, :256], expected[:, :, :256])
    assert output[:, :, 290:].isnan().all()


def inside(tensor: Tensor) -> Tensor:
    """Return a view of the tensor surrounded by NaN, with equal strides between its rows."""
    around = torch.full([size + 2 for size in tensor.shape], math.nan).to(tensor)
    view = around[tuple(slice(1, 1 + size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


@each_pair("size", head_dim=[64, 72], is_causal=[False, True], size=LOADS)
def test_stays_in_bounds(monkeypatch: pytest.MonkeyPatch, head_dim: int, is_causal: bool) -> None:
    call = call_of((2, 2, 1, 150, 77, head_dim, head_dim), is_causal=is_causal)
    mask = inside(mask_of((2, 2, 150, 77), HALF))
    outputs = []

    def output_inside(query: Tensor, v_head_dim: int) -> Tensor:
        outputs.append(inside(query.new_zeros(*query.shape[:3], v_head_dim)))
        return outputs[-1]

    monkeypatch.setattr(forward, "_output_of", output_inside)
    monkeypatch.setattr(forward, "_allocated", lambda query, sizes, strides: outputs[-1])
    tensors = {name: inside(tensor) for name, tensor in call.tensors().items()}
    verify(call.with_tensors({**tensors, "attn_mask": mask}))
    around = outputs[0]._base
    outputs[0].fill_(math.nan)
    assert around.isnan().all()
