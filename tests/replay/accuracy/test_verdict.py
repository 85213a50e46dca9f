"""Honest torch kernels pass on hard inputs, and broken outputs fail."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.accuracy.thresholds import ExactThresholds, QuantisedThresholds, Thresholds
from replay.accuracy.tolerance import RowTolerance, Tolerance
from replay.accuracy.verdict import Expected, OutputVerdict, judge
from replay.rows.errors_of_output import AccuracyClass
from tests.factories import one_head, random_call

NOTHING = Tolerance(0.0, 0.0)


def verdict_of(
    output: Tensor, reference: Tensor, rule: AccuracyClass = "exact", allowed: Tolerance = NOTHING
) -> OutputVerdict:
    return judge(output, Expected(reference, allowed), rule)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("accuracy_class", ["exact", "quantised"])
def test_non_finite_element_fails(bad: float, accuracy_class: AccuracyClass) -> None:
    reference = torch.randn(2, 3, 10, 4)
    output = reference.clone()
    output[1, 2, 7, 3] = bad
    verdict = verdict_of(output, reference, accuracy_class, Tolerance(1e9, 1e9))
    assert verdict.tolerance_ratio == math.inf
    assert verdict.sentence.startswith("1 elements are NaN or infinite")


def test_exact_sentence_has_the_numbers() -> None:
    reference, output = one_head([1.0]), one_head([1.03125])
    allowed = Tolerance(same_dtype_error=0.0019, rounding=0.0002)
    verdict = verdict_of(output, reference, "exact", allowed)
    assert verdict.tolerance_ratio == pytest.approx(0.03125 / 0.004)
    assert verdict.sentence == "7.81 × its tolerance: max abs error 0.031 exceeds 0.004"
    far = verdict_of(output, reference, "exact", Tolerance(1.23456e-7, 0.0)).sentence
    assert far.startswith("127,000 × its tolerance: ")
    farther = verdict_of(output, reference, "exact", Tolerance(1e-30, 0.0)).sentence
    assert farther.startswith("1.6e+28 × its tolerance: ")
    # An error equal to the limit passes.
    assert verdict_of(output, reference, "exact", Tolerance(0.015625, 0.0)).passed


def test_float32_tolerance_covers_another_order_of_sums() -> None:
    """Torch and the reference add up many keys for one query row in different orders."""
    torch.manual_seed(0)
    query = torch.randn(1, 8, 1, 40)
    key, value = torch.randn(1, 2, 4096, 40), torch.randn(1, 2, 4096, 40) + 2
    call = AttentionCall(query, key, value, enable_gqa=True)
    output = F.scaled_dot_product_attention(**call.arguments())
    expected = Expected.of(call)
    assert judge(output, expected, "exact").passed
    assert not judge(output * (1 + 1e-4), expected, "exact").passed


def test_quantised_rule_limits_cosine_and_relative_l1() -> None:
    reference = attention(random_call(q_len=1024, kv_len=1024, head_dim=64, dtype=torch.bfloat16))
    noise = torch.randn_like(reference) * reference.square().mean().sqrt()
    good = verdict_of(reference + 0.05 * noise, reference, "quantised")
    assert good.passed, good.sentence
    bad = verdict_of(reference + 0.3 * noise, reference, "quantised")
    assert bad.tolerance_ratio == pytest.approx((1 - bad.errors.cosine) / 0.01)
    assert "is below 0.99" in bad.sentence
    wrong_factor = verdict_of(reference * 1.2, reference, "quantised")
    assert wrong_factor.tolerance_ratio == pytest.approx(0.2 / 0.1)
    assert "relative L1 0.2 exceeds 0.1" in wrong_factor.sentence


def long_causal_call(dtype: torch.dtype, length: int) -> AttentionCall:
    """Return a causal call whose first values are largest and last outputs 100 times smaller."""
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
    honest = judge(output, expected, "exact")
    assert honest.passed, honest.sentence
    limits = allowed.rows.limits(ExactThresholds())[0, 0]

    smallest = int(reference[0, 0].abs().amax(-1).argmin())
    zeroed = output.clone()
    zeroed[0, 0, smallest] = 0
    swapped = output.clone()
    swapped[0, 0, [smallest, smallest - 1]] = output[0, 0, [smallest - 1, smallest]]
    for broken in (zeroed, swapped):
        error = (broken - reference)[0, 0, smallest].norm() / limits[smallest]
        assert judge(broken, expected, "exact").tolerance_ratio >= error > 10
    # In bfloat16, the maximum error alone does not reveal the lost row.
    if dtype == torch.bfloat16:
        by_maximum = verdict_of(zeroed, reference, "exact", replace(allowed, rows=None))
        assert by_maximum.passed
        place = f"worst row (batch 0, head 0, query {smallest}): error norm "
        own = by_maximum.sentence.partition(": ")[2]
        assert f": {own}; {place}" in judge(zeroed, expected, "exact").sentence


@pytest.mark.parametrize("length", [64, 512])
def test_one_key_too_many_fails(length: int) -> None:
    """Every row is 0.3 % too short, which rounding could explain in a single row only."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, 2, size, 64, generator=generator).half() for size in (length, 201, 201)
    )
    call = AttentionCall(query, key, value)
    expected, zero = Expected.of(call), torch.zeros(1, 2, 1, 64).half()
    honest = F.scaled_dot_product_attention(query, key, value)
    assert judge(honest, expected, "exact").passed
    longer = torch.cat([key, zero], 2), torch.cat([value, zero], 2)
    for broken, said in (
        (F.scaled_dot_product_attention(query, *longer), "too short"),
        (honest * 1.003, "too long"),
    ):
        verdict = judge(broken, expected, "exact")
        found = re.search(
            rf"together (0\.29|0\.3.?)% {said}, where rounding is within (.*)%", verdict.sentence
        )
        assert verdict.tolerance_ratio == pytest.approx(float(found[1]) / float(found[2]), rel=0.05)
        assert "is within" in verdict.sentence.partition("worst row")[2]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "length", "first", "value"),
    [
        (torch.bfloat16, 80, 700, 6.64 / 9, 1.336),
        (torch.float16, 80, 700, 7.23 / 9, 1.324),
        (torch.float32, 16, 600, 7.75 / 4, 0.567),
    ],
)
def test_equal_values_may_round_alike_in_all_rows(
    dtype: torch.dtype, head_dim: int, length: int, first: float, value: float
) -> None:
    """Probabilities, output, and partial sums of equal terms all round in the same direction."""
    query, key = torch.ones(1, 1, 512, head_dim), torch.zeros(1, 1, length, head_dim)
    key[:, :, 0] = first
    call = AttentionCall(query.to(dtype), key.to(dtype), torch.full_like(key, value).to(dtype))
    scores = call.query.float() @ call.key.float().mT * call.softmax_scale
    weights = torch.softmax(scores, -1).to(dtype).float()
    output = torch.zeros_like(query)
    for place in range(length):
        output += weights[..., place, None] * call.value[:, :, place, None].float()
    verdict = judge(output.to(dtype), Expected.of(call), "exact")
    assert verdict.passed, verdict.sentence


def rows_of(noise: list[float], eager: float = 0.0) -> RowTolerance:
    """Return the tolerance of one head whose rows have this rounding noise."""
    return RowTolerance(
        torch.tensor([[noise]], dtype=torch.float64),
        torch.full((1, 1, 1), eager, dtype=torch.float64),
        torch.zeros(1, 1, 1, dtype=torch.float64),
    )


def test_row_sentence_has_the_numbers_and_the_place() -> None:
    reference = one_head([10.0, 0.0], [3.0, 4.0])
    output = one_head([11.0, 0.0], [6.0, 8.0])  # off by 1 and by 5
    allowed = Tolerance(2.5, 0.0, rows=rows_of([0.5, 0.5], eager=1.5))
    verdict = verdict_of(output, reference, "exact", allowed)
    assert not verdict.passed
    assert verdict.sentence == (
        "1.43 × its tolerance: max abs error 4 is within 5; "
        "worst row (batch 0, head 0, query 1): error norm 5 exceeds 3.5"
    )
    wider = replace(allowed, rows=rows_of([0.5, 0.5], eager=3.0))  # exactly at the limit
    assert verdict_of(output, reference, "exact", wider).passed
    # The worst row is the row that exceeds its own limit by the largest factor.
    named = replace(allowed, rows=rows_of([0.02, 0.5], eager=1.5))
    verdict = verdict_of(output, reference, "exact", named)
    assert "query 0): error norm 1 exceeds 0.14" in verdict.sentence


def test_rows_whose_noise_is_unknown_are_not_judged() -> None:
    reference = one_head([3.0, 4.0], [1.0, 0.0])
    output = one_head([3.0, 4.0], [0.0, 1.0])
    for unknown in (math.nan, math.inf):
        allowed = Tolerance(1.0, 0.0, rows=rows_of([1e-6, unknown]))
        assert verdict_of(output, reference, "exact", allowed).passed
        output[0, 0, 0] = 0.0
        assert not verdict_of(output, reference, "exact", replace(allowed, noise=9.0)).passed
        output[0, 0, 0] = reference[0, 0, 0]


def test_few_elements_have_the_noise_of_their_worst_row() -> None:
    """Eager may be accurate by luck, which must not tighten the limit for other kernels."""
    verdict = verdict_of(one_head([1.0]), one_head([1.5]), "exact", Tolerance(0.0, 0.1, noise=0.1))
    assert not verdict.passed
    assert verdict.sentence == "1.25 × its tolerance: max abs error 0.5 exceeds 0.4"


def test_class_has_its_own_thresholds() -> None:
    reference, output = one_head([1.0, 0.0]), one_head([1.25, 0.0])
    allowed = Tolerance(0.1, 0.0, rows=rows_of([0.05]))
    wide, narrow = ExactThresholds(3.0, 8.0), ExactThresholds()
    for accuracy_class, thresholds in (
        ("exact", Thresholds(exact=wide, sparse=narrow)),
        ("sparse", Thresholds(exact=narrow, sparse=wide)),
    ):
        expected = Expected(reference, allowed)
        assert judge(output, expected, accuracy_class, thresholds).passed
        other = "sparse" if accuracy_class == "exact" else "exact"
        assert not judge(output, expected, other, thresholds).passed
    loose = Thresholds(quantised=QuantisedThresholds(maximum_relative_l1=0.3))
    assert judge(output, Expected(reference, allowed), "quantised", loose).passed
    assert not judge(output, Expected(reference, allowed), "quantised").passed


@pytest.mark.parametrize("accuracy_class", ["exact", "quantised", "sparse"])
@pytest.mark.parametrize("q_len", [9, 70])
def test_only_zeros_are_right_without_keys(accuracy_class: AccuracyClass, q_len: int) -> None:
    call = random_call(q_heads=4, kv_heads=2, q_len=q_len, kv_len=0, dtype=torch.bfloat16)
    chosen = torch.ones(q_len, 0, dtype=torch.bool) if accuracy_class == "sparse" else None
    expected, zeros = Expected.of(call, chosen), torch.zeros_like(call.query)
    assert judge(zeros, expected, accuracy_class).passed
    for wrong in (zeros + 0.01, zeros + math.nan):
        assert not judge(wrong, expected, accuracy_class).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_without_keys_may_not_err(dtype: torch.dtype) -> None:
    """Rows of timed samples are judged as heads."""
    found = Expected.of_heads(random_call(kv_len=0, dtype=dtype))
    assert len(found) == 2
    assert all(not bool(each.reference.any()) for each in found)
    assert all(each.tolerance.same_dtype_error == 0 for each in found)
