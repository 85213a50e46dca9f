"""Honest 8-bit kernels pass on ordinary and hard inputs; a lost head, row or block of keys fails.

The kernels are emulated in PyTorch, with whole score matrices in float32.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy import quantised
from replay.accuracy.quantised import to_fp8, to_int8
from replay.accuracy.thresholds import QuantisedThresholds, Thresholds
from replay.accuracy.verdict import Expected, judge
from tests import factories

Rounding = Callable[[Tensor], Tensor]


ROW, CHANNEL, HEAD = (-1,), (2,), (2, 3)
"""Dimensions of the numbers that share a scale."""


def scaled(
    tensor: Tensor, rounding: Callable[[Tensor, Tensor], Tensor], shared: tuple[int, ...]
) -> Tensor:
    return rounding(tensor, tensor.abs().amax(shared, keepdim=True))


def per_block(
    tensor: Tensor, rounding: Callable[[Tensor, Tensor], Tensor], rows: int = 64
) -> Tensor:
    return torch.cat([scaled(each, rounding, HEAD) for each in tensor.split(rows, dim=2)], 2)


def sage_1(tensor: Tensor) -> Tensor:
    return per_block(tensor, to_int8)


def unnormalised_fp8(weights: Tensor) -> Tensor:
    """Return unnormalised probabilities of up to 256, as FlashAttention-3 does."""
    return (weights * 256).to(torch.float8_e4m3fn).float() / 256


def half(tensor: Tensor) -> Tensor:
    return tensor.half().float()


SAGE_2: tuple[Rounding, Rounding, Rounding, Rounding] = (
    lambda query: per_block(query, to_int8, 32),
    sage_1,
    lambda value: scaled(value, to_fp8, CHANNEL),
    lambda weights: scaled(weights, to_fp8, ROW),
)
KERNELS: dict[str, tuple[Rounding, Rounding, Rounding, Rounding, bool]] = {
    # Rounding of query, key, value and probabilities; True if the keys' mean is subtracted.
    "sage 1": (sage_1, sage_1, half, half, True),
    "sage 2": (*SAGE_2, True),
    "sage 2 unsmoothed": (*SAGE_2, False),
    "flash 3": (*(lambda tensor: scaled(tensor, to_fp8, HEAD),) * 3, unnormalised_fp8, False),
    "all int8": (
        lambda query: scaled(query, to_int8, ROW),
        lambda key: scaled(key, to_int8, ROW),
        lambda value: scaled(value, to_int8, CHANNEL),
        lambda weights: scaled(weights, to_int8, ROW),
        True,
    ),
}


def attend(call: AttentionCall, name: str) -> Tensor:
    round_query, round_key, round_value, round_weights, smooth = KERNELS[name]
    query, key, value = (each.float() for each in (call.query, call.key, call.value))
    if smooth:
        key = key - key.mean(dim=2, keepdim=True)
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) for each in (round_key(key), round_value(value)))
    scores = round_query(query) @ key.mT * call.softmax_scale
    if call.attn_mask is not None:
        scores = scores.masked_fill(~call.attn_mask, -math.inf)
    if call.is_causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    output = round_weights(weights) @ value / weights.sum(dim=-1, keepdim=True)
    return output.to(call.dtype)


def many_heads(dtype: torch.dtype, q_len: int = 16) -> AttentionCall:
    """Return a call with 64 heads and 4,096 keys."""
    return factories.random_call(
        q_heads=64, kv_heads=8, q_len=q_len, kv_len=4096, head_dim=64, dtype=dtype
    )


@pytest.mark.parametrize("q_len", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_quantised_rule_finds_errors_that_the_whole_output_hides(q_len: int) -> None:
    call = many_heads(torch.bfloat16, q_len)
    expected = Expected.of(call)
    whole_alone = replace(expected, call=None)
    without_last = replace(call, key=call.key[:, :, :-32], value=call.value[:, :, :-32])
    for name in KERNELS:
        output = attend(call, name)
        honest = judge(output, expected, "quantised")
        assert honest.passed, f"{name}: {honest.sentence}"
        no_head, bad_row = output.clone(), output.clone()
        no_head[0, 17] = 0
        bad_row[0, 40, -1] *= -3
        for broken in (no_head, bad_row, attend(without_last, name)):
            assert not judge(broken, expected, "quantised").passed, name
            if name == "sage 1" and (broken is not bad_row or q_len > 1):
                assert judge(broken, whole_alone, "quantised").passed, name
    fewer = F.scaled_dot_product_attention(**without_last.arguments())
    assert not judge(fewer, expected, "quantised").passed  # has no 8-bit error, but fewer keys


def hard_call(values: str, seed: int, dtype: torch.dtype, **fields: object) -> AttentionCall:
    call = factories.random_call(
        q_heads=4, kv_heads=2, q_len=96, kv_len=200, head_dim=64, seed=seed, dtype=dtype, **fields
    )
    if values == "outlier channels":
        call.query[..., 5] *= 8
        call.key[..., 3] *= 16
        call.value[..., 7] *= 16
    elif values == "one mean":
        call.key.add_(2 * factories.normal(1, 2, 1, 64, seed=seed, dtype=dtype))
        call.value.add_(2 * factories.normal(1, 2, 1, 64, seed=seed + 1, dtype=dtype))
    elif values == "heavy tails":
        call.value.mul_((2 * factories.normal(1, 2, 200, 1, seed=seed, dtype=dtype)).exp())
    elif values == "sharp":
        call.query.mul_(3)
    elif values == "flat":
        call.query.mul_(1e-3)
    elif values == "whole numbers":
        call.value.mul_(4).round_()
    return call


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HARD = ("outlier channels", "one mean", "heavy tails", "sharp", "flat", "whole numbers")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        pytest.param(values, dtype, marks=[pytest.mark.slow] * ((i + j) % 3 != 0))
        for i, values in enumerate(HARD)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_honest_8_bit_kernels_pass(values: str, dtype: torch.dtype) -> None:
    mask = torch.rand(96, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    first = time.time_ns() // 1000 % 2**40
    for seed in range(first, first + 2):
        for fields in ({}, {"is_causal": True}, {"attn_mask": mask}):
            call = hard_call(values, seed, dtype, **fields)
            expected = Expected.of(call)
            for name in KERNELS:
                output = attend(call, name)
                if judge(output, replace(expected, call=None), "quantised").passed:
                    verdict = judge(output, expected, "quantised")
                    assert verdict.passed, f"seed {seed}, {name}: {verdict.sentence}"


def test_sentence_names_heads_and_rows() -> None:
    call = hard_call("plain", 0, torch.float16)
    expected = Expected.of(call)
    output = attend(call, "sage 2")
    no_head, no_row = output.clone(), output.clone()
    no_head[0, 2] = 0
    no_row[0, 3, 90] = 0
    sentence = judge(no_head, expected, "quantised").sentence
    assert "worst head (batch 0, head 2): relative L1 1 exceeds 0.0" in sentence
    sentence = judge(no_row, expected, "quantised").sentence
    assert "; worst row (batch 0, head 3, query 90): error norm 0." in sentence
    assert sentence.endswith("(8-bit attention in that head)")


def may_use_tf32() -> bool:
    if hasattr(torch.backends.mkldnn, "matmul"):
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
    return torch.backends.cuda.matmul.allow_tf32


class TF32(torch.overrides.TorchFunctionMode):
    """Rounds operands of float32 products to 11 bits like TF32, or truncates like hardware."""

    def __init__(self, *, cuts: bool = False) -> None:
        super().__init__()
        self.added = 0 if cuts else 2**12
        self.products = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_product = func in (Tensor.matmul, Tensor.__matmul__, torch.matmul)
        if is_product and may_use_tf32():
            self.products += 1
            args = tuple(
                (each.view(torch.int32) + self.added & -(2**13)).view(torch.float32)
                for each in args
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("values", "cuts"), zip(HARD, (False, True) * 3, strict=True))
def test_tf32_does_not_change_verdicts(values: str, cuts: bool) -> None:
    """TF32 may change only a head's worst row, by up to a tenth."""
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        call = hard_call(values, seed, dtype)
        exact, rounded = Expected.of(call), Expected.of(call)
        with TF32(cuts=cuts) as mode:
            assert rounded.quantised is not None
        assert mode.products > 0
        for name in KERNELS:
            output = attend(call, name)
            worse_head = output.clone()
            worse_head[0, 2] *= 0.9
            for each in (output, worse_head):
                passed = judge(each, exact, "quantised").passed
                assert judge(each, rounded, "quantised").passed == passed, (seed, name)


def test_thresholds_change_limits_of_heads_and_rows() -> None:
    call = hard_call("plain", 0, torch.float16)
    expected = Expected.of(call)
    output = attend(call, "flash 3")
    strict = Thresholds(quantised=QuantisedThresholds(noise_factor=0.5))
    assert judge(output, expected, "quantised").passed
    assert not judge(output, expected, "quantised", strict).passed
    output[0, 3, 90] = 0
    loose = Thresholds(quantised=QuantisedThresholds(row_factor=30))
    assert not judge(output, expected, "quantised").passed
    assert judge(output, expected, "quantised", loose).passed


def test_rows_with_nan_are_left_out() -> None:
    call = hard_call("plain", 0, torch.float16)
    call.query[0, 1, 5] = math.nan
    output = F.scaled_dot_product_attention(**call.arguments())
    verdict = judge(output, Expected.of(call), "quantised")
    assert verdict.passed, verdict.sentence
    output[0, 1, 50] *= -3
    assert not judge(output, Expected.of(call), "quantised").passed


def test_relative_l1_and_margin_equal_figures_by_hand() -> None:
    signal = torch.full((32,), 2.0, dtype=torch.float64)
    absolute = signal * torch.tensor([0.1, 0.3]).double().repeat(16)
    found, margin = quantised._ratio(absolute, signal, numbers=50).tolist()
    assert found == pytest.approx(0.2)
    standard_error = 0.1 * math.sqrt(32 / 31) / math.sqrt(32)
    assert margin == pytest.approx(4 * standard_error + 2 * 0.2 / 10)
    few = quantised._ratio(absolute[:31], signal[:31], numbers=50)
    assert few[1].isinf()
