"""What passes and what does not: honest kernels of torch on hard inputs, and broken outputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call import AttentionCall
from replay.accuracy.errors import compare
from replay.accuracy.judge import Expected, Verdict, judge
from replay.accuracy.reference import attention
from replay.accuracy.thresholds import ExactThresholds
from replay.accuracy.tolerance import RowTolerance, Tolerance
from replay.rows.row import AccuracyClass
from tests.factories import one_head

NOTHING = Tolerance(0.0, 0.0)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def verdict_of(
    output: Tensor,
    reference: Tensor,
    accuracy_class: AccuracyClass = "exact",
    allowed: Tolerance = NOTHING,
) -> Verdict:
    return judge(output, Expected(reference, allowed), accuracy_class)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("accuracy_class", ["exact", "quantised"])
def test_a_non_finite_element_fails(bad: float, accuracy_class: AccuracyClass) -> None:
    reference = torch.randn(2, 3, 10, 4)
    output = reference.clone()
    output[1, 2, 7, 3] = bad
    verdict = verdict_of(output, reference, accuracy_class, Tolerance(1e9, 1e9))
    assert not verdict.passed
    assert verdict.sentence.startswith("1 elements are NaN or infinite")


def test_nan_that_the_reference_has_too_passes() -> None:
    reference = one_head([math.nan, 1.0], [math.inf, 2.0], [3.0, 4.0])
    assert verdict_of(reference.clone(), reference, "quantised").passed
    assert not verdict_of(one_head([0.0, 1.0]), one_head([math.nan, 1.0]), "quantised").passed


def long_call(dtype: torch.dtype, is_causal: bool = False) -> AttentionCall:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 1024, 64).to(dtype) for _ in range(3))
    return AttentionCall(query, key, value, is_causal=is_causal)


def exact_verdict(output: Tensor, call: AttentionCall) -> Verdict:
    return judge(output, Expected.of(call), "exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_rule_passes_torch_and_fails_what_is_broken(
    dtype: torch.dtype, is_causal: bool
) -> None:
    call = long_call(dtype, is_causal)
    output = F.scaled_dot_product_attention(**call.arguments())
    expected = Expected.of(call)
    reference, allowed = expected.reference, expected.tolerance

    def passes(candidate: Tensor) -> bool:
        return verdict_of(candidate, reference, "exact", allowed).passed

    assert passes(output)
    assert not passes(torch.zeros_like(output))
    for where in ((0, 1), (0, 1, 1000), (0, slice(None), slice(960, None))):
        broken = output.clone()
        broken[where] = 0
        assert not passes(broken), where
    unscaled = F.scaled_dot_product_attention(**(call.arguments() | {"scale": 1.0}))
    other_mask = F.scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=not is_causal
    )
    assert not passes(unscaled)
    assert not passes(other_mask)


def test_all_zero_output_is_small_in_absolute_terms_and_still_fails() -> None:
    call = long_call(torch.bfloat16)
    errors = compare(torch.zeros_like(call.query), attention(call))
    assert errors.mae < 5e-2  # an absolute tolerance would have to be smaller than that
    verdict = exact_verdict(torch.zeros_like(call.query), call)
    assert not verdict.passed
    assert verdict.sentence.startswith("max abs error 0.3 exceeds")


def test_exact_sentence_has_the_numbers() -> None:
    reference, output = one_head([1.0]), one_head([1.03125])
    allowed = Tolerance(same_dtype_error=0.0019, rounding=0.0002)
    verdict = verdict_of(output, reference, "exact", allowed)
    assert not verdict.passed
    assert verdict.sentence == (
        "max abs error 0.031 exceeds 0.004 = 2 × 0.0019 (same-dtype eager) + 0.0002 (rounding)"
    )
    # The limit itself passes.
    assert verdict_of(output, reference, "exact", Tolerance(0.015625, 0.0)).passed


def test_sparse_is_judged_as_exact() -> None:
    call = long_call(torch.bfloat16)
    expected = Expected.of(call)
    for output in (expected.reference.to(call.dtype), torch.zeros_like(call.query)):
        exact, sparse = judge(output, expected, "exact"), judge(output, expected, "sparse")
        assert (sparse.passed, sparse.errors) == (exact.passed, exact.errors)
        assert sparse.sentence == f"on the keys it chose, {exact.sentence}"


def test_float32_tolerance_covers_another_order_of_sums() -> None:
    """One query row against many keys: torch sums it otherwise than the oracle does."""
    torch.manual_seed(0)
    query = torch.randn(1, 8, 1, 40)
    key, value = torch.randn(1, 2, 4096, 40), torch.randn(1, 2, 4096, 40) + 2
    call = AttentionCall(query, key, value, enable_gqa=True)
    output = F.scaled_dot_product_attention(**call.arguments())
    assert exact_verdict(output, call).passed
    assert not exact_verdict(output * (1 + 1e-4), call).passed


def test_quantised_class() -> None:
    call = long_call(torch.bfloat16)
    reference = attention(call)
    noise = torch.randn_like(reference) * reference.square().mean().sqrt()
    good = verdict_of(reference + 0.05 * noise, reference, "quantised")
    assert good.passed, good.sentence
    bad = verdict_of(reference + 0.3 * noise, reference, "quantised")
    assert not bad.passed
    assert "is below 0.99" in bad.sentence
    wrong_factor = verdict_of(reference * 1.2, reference, "quantised")
    assert not wrong_factor.passed
    assert "relative L1 0.2 exceeds 0.1" in wrong_factor.sentence


def long_causal_call(dtype: torch.dtype, length: int) -> AttentionCall:
    """Its first values are the largest, and its last outputs a hundredth of its first."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, 1, length, 64, generator=generator).to(dtype) for _ in range(3)
    )
    value[:, :, :4] *= 3
    return AttentionCall(query, key, value, is_causal=True)


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 4096), (torch.float16, 1024)])
def test_one_lost_row_of_a_long_causal_call_fails(dtype: torch.dtype, length: int) -> None:
    call = long_causal_call(dtype, length)
    expected = Expected.of(call)
    reference, allowed = expected.reference, expected.tolerance
    output = F.scaled_dot_product_attention(**call.arguments())
    honest = verdict_of(output, reference, "exact", allowed)
    assert honest.passed, honest.sentence
    assert allowed.rows is not None
    limits = allowed.rows.limits(ExactThresholds())

    smallest = int(reference[0, 0].abs().amax(-1).argmin())
    zeroed = output.clone()
    zeroed[0, 0, smallest] = 0
    swapped = output.clone()
    swapped[0, 0, [smallest, smallest - 1]] = output[0, 0, [smallest - 1, smallest]]
    for broken in (zeroed, swapped):
        verdict = judge(broken, expected, "exact")
        assert not verdict.passed
        # Many times too much, not a close call.
        error = torch.linalg.vector_norm(broken[0, 0, smallest] - reference[0, 0, smallest])
        assert error > 10 * limits[0, 0, smallest]
    # The maximum alone would not see the lost row of bfloat16.
    if dtype == torch.bfloat16:
        by_maximum = verdict_of(zeroed, reference, "exact", replace(allowed, rows=None))
        assert by_maximum.passed
        assert verdict_of(zeroed, reference, "exact", allowed).sentence.startswith(
            by_maximum.sentence + f"; worst row (batch 0, head 0, query {smallest}): error "
        )


def test_row_sentence_has_the_numbers_and_the_place() -> None:
    reference = one_head([1.0, 0.0], [3.0, 4.0])
    output = one_head([1.0, 0.0], [4.0, 3.0])
    noise, eager = torch.full((1, 1, 2), 0.1), torch.full((1, 1, 1), 0.5)
    allowed = Tolerance(1.0, 0.0, rows=RowTolerance(noise, eager))
    verdict = verdict_of(output, reference, "exact", allowed)
    assert not verdict.passed
    assert verdict.sentence == (
        "max abs error 1 is within 2 = 2 × 1 (same-dtype eager) + 0 (rounding); "
        "worst row (batch 0, head 0, query 1): error 1.4 exceeds 0.5 = "
        "(4 + 2 × 0.5 of same-dtype eager) × 0.1 (rounding)"
    )
    wider = replace(allowed, rows=RowTolerance(noise, 11 * eager))
    assert verdict_of(output, reference, "exact", wider).passed


def test_rows_of_which_nothing_can_be_said_are_left_to_the_maximum() -> None:
    reference, output = one_head([3.0, 4.0], [1e-9, 0.0]), one_head([3.0, 4.0], [0.0, 1e-9])
    rows = RowTolerance(torch.tensor([[[1e-6, math.inf]]]), torch.zeros(1, 1, 1))
    assert verdict_of(output, reference, "exact", Tolerance(1.0, 0.0, rows=rows)).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_small_rows_are_judged_honestly_and_strictly(dtype: torch.dtype) -> None:
    """Fresh values each time: SDPA is right; a neighbour's row, or nine tenths of one, is not."""
    for _ in range(20):
        query, key, value = (
            torch.randn(1, 2, length, 128).to(dtype) for length in (64, 1024, 1024)
        )
        call = AttentionCall(query, key, value)
        expected = Expected.of(call)
        for backend in KERNELS:
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(**call.arguments())
            honest = judge(output, expected, "exact")
            assert honest.passed, honest.sentence
        neighbour, shrunk = output.clone(), output.clone()
        neighbour[0, 1, 30] = output[0, 1, 31]
        shrunk[0, 1, 30] *= 0.9
        for broken in (neighbour, shrunk):
            verdict = judge(broken, expected, "exact")
            assert not verdict.passed
            assert "query 30" in verdict.sentence
            assert verdict.where.head == (0, 1)


def test_a_defect_of_a_quantised_kernel_is_not_lost_in_the_whole() -> None:
    query, key, value = (torch.randn(1, 64, 64, 64, dtype=torch.bfloat16) for _ in range(3))
    call = AttentionCall(query, key, value)
    expected = Expected.of(call)
    honest = (expected.reference * (1 + 0.01 * torch.randn(1, 64, 64, 64))).to(call.dtype)
    assert judge(honest, expected, "quantised").passed
    lost_head, lost_row = honest.clone(), honest.clone()
    lost_head[:, 17] = 0
    lost_row[:, 17, -1] *= -3
    for broken in (lost_head, lost_row):
        verdict = judge(broken, expected, "quantised")
        assert not verdict.passed
        assert verdict.where.head == (0, 17)


VALUES = ["normal", "heavy tails", "one mean", "cancelling", "tiny", "huge", "sharp", "flat"]


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    heads=st.sampled_from([1, 2, 6]),
    q_len=st.sampled_from([1, 2, 7, 64, 130]),
    kv_len=st.sampled_from([1, 2, 3, 33, 128, 300]),
    head_dim=st.sampled_from([8, 32, 64]),
    v_head_dim=st.sampled_from([1, 2, 8, 16, 32, 64]),
    values=st.sampled_from(VALUES),
    mask=st.sampled_from(["none", "causal", "bool", "float"]),
    kept=st.sampled_from([0.02, 0.5, 0.95]),
    seed=st.integers(0, 2**16),
)
def test_honest_kernels_pass_whatever_the_values(
    dtype: torch.dtype,
    heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    v_head_dim: int,
    values: str,
    mask: str,
    kept: float,
    seed: int,
) -> None:
    """Dv of 1, rows without any key, sums that cancel to noise, subnormals, huge numbers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    query = normal(1, heads, q_len, head_dim) * {"sharp": 6.0, "flat": 1e-3}.get(values, 1.0)
    key = normal(1, heads, kv_len, head_dim)
    value = normal(1, heads, kv_len, v_head_dim)
    if values == "heavy tails":
        value *= torch.exp(2 * normal(1, heads, kv_len, 1))
    elif values == "one mean":
        value = 0.1 * value + 3 * normal(1, heads, 1, v_head_dim)
    elif values == "cancelling":
        value[:, :, 1::2] = -1.003 * value[:, :, 0 : kv_len - kv_len % 2 : 2]
        query *= 0.01
    value *= {"tiny": 1e-6, "huge": 3e3}.get(values, 1.0)
    attn_mask = None
    if mask in ("bool", "float"):
        attn_mask = torch.rand(1, 1, q_len, kv_len, generator=generator) < kept
        attn_mask[..., 0, :] = False  # a query without any key
        if mask == "float":
            attn_mask = torch.zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf).to(dtype)
    call = AttentionCall(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        attn_mask=attn_mask,
        is_causal=mask == "causal",
    )
    expected = Expected.of(call)
    reference, allowed = expected.reference, expected.tolerance
    for backend in KERNELS if v_head_dim == head_dim else KERNELS[1:]:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(**call.arguments())
        verdict = verdict_of(output, reference, "exact", allowed)
        assert verdict.passed, f"{backend}: {verdict.sentence}"
