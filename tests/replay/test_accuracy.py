"""Figures computed by hand, and broken outputs that must not pass."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call import AttentionCall
from replay import accuracy
from replay.accuracy import Tolerance, compare, judge, summary, tolerance
from replay.reference import attention, same_dtype


def rows(*values: list[float]) -> Tensor:
    """One batch, one head: (1, 1, S, Dv)."""
    return torch.tensor(values, dtype=torch.float64)[None, None]


def flat(errors: accuracy.Errors) -> dict[str, float]:
    """The figures as numbers, which `pytest.approx` compares."""
    figures = asdict(errors)
    for name in ("worst_row", "worst_head"):
        figures |= {f"{name}{place}": index for place, index in enumerate(figures.pop(name))}
    return figures


def test_figures_by_hand() -> None:
    errors = compare(rows([3.0, 4.0], [0.0, 1.0]), rows([3.0, 5.0], [1.0, 0.0]))
    assert errors.cosine == pytest.approx(29 / math.sqrt(26 * 35))
    assert errors.relative_l1 == pytest.approx(3 / 9)
    assert errors.mse == pytest.approx(3 / 4)
    assert errors.rmse == pytest.approx(math.sqrt(3 / 4))
    assert errors.mae == pytest.approx(3 / 4)
    assert errors.max_abs == 1.0
    first = 29 / (5 * math.sqrt(34))
    assert errors.row_cosine_min == 0.0
    assert errors.row_cosine_p1 == pytest.approx(0.01 * first)
    assert errors.row_cosine_p10 == pytest.approx(0.1 * first)
    assert (errors.worst_row, errors.worst_head) == ((0, 0, 1), (0, 0))
    assert errors.worst_head_relative_l1 == errors.relative_l1
    assert errors.worst_head_cosine == pytest.approx(errors.cosine)


def test_equal_outputs_have_no_error() -> None:
    output = torch.randn(2, 3, 5, 7)
    errors = compare(output, output)
    assert errors.cosine == pytest.approx(1.0, abs=1e-15)
    assert errors.cosine <= 1.0
    assert (errors.relative_l1, errors.rmse, errors.max_abs) == (0.0, 0.0, 0.0)


def test_zero_rows() -> None:
    assert compare(rows([0.0, 0.0]), rows([0.0, 0.0])).row_cosine_min == 1.0
    assert compare(rows([0.0, 0.0]), rows([0.0, 0.0])).relative_l1 == 0.0
    assert compare(rows([0.0, 0.0]), rows([0.0, 1.0])).cosine == 0.0
    only_output = compare(rows([0.0, 1.0]), rows([0.0, 0.0]))
    assert (only_output.cosine, only_output.relative_l1) == (0.0, math.inf)


def test_figures_are_plain_json() -> None:
    errors = compare(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    assert json.loads(json.dumps(asdict(errors)))["worst_head"] == list(errors.worst_head)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    output, reference = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 50, 8)
    whole = flat(compare(output, reference))
    whole_summary = asdict(summary(output))
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", 2 * 3 * 8 * 7)
    assert flat(compare(output, reference)) == pytest.approx(whole, rel=1e-12)
    assert asdict(summary(output)) == pytest.approx(whole_summary, rel=1e-12)


def test_strides_and_dtypes_do_not_matter() -> None:
    output = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    reference = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    assert compare(output, reference) == compare(output.contiguous().double(), reference)


def test_percentiles_agree_with_torch() -> None:
    output, reference = torch.randn(1, 4, 250, 16), torch.randn(1, 4, 250, 16)
    cosines = F.cosine_similarity(output.double(), reference.double(), dim=-1).flatten()
    errors = compare(output, reference)
    assert errors.row_cosine_p1 == pytest.approx(cosines.quantile(0.01).item())
    assert errors.row_cosine_p10 == pytest.approx(cosines.quantile(0.1).item())
    assert errors.row_cosine_min == pytest.approx(cosines.min().item())


def test_a_broken_head_is_named() -> None:
    reference = torch.randn(2, 30, 64, 16)
    output = reference.clone()
    output[1, 17] = reference[1, 16]
    errors = compare(output, reference)
    assert errors.cosine > 0.95
    assert errors.worst_head == (1, 17)
    assert abs(errors.worst_head_cosine) < 0.2
    assert errors.worst_head_relative_l1 > 1


def test_a_broken_row_is_named() -> None:
    reference = torch.randn(2, 6, 2048, 32)
    output = reference.clone()
    output[1, 3, 2000] = -reference[1, 3, 2000]
    errors = compare(output, reference)
    assert errors.cosine > 0.999
    assert errors.row_cosine_min == pytest.approx(-1.0)
    assert errors.row_cosine_p1 == pytest.approx(1.0)
    assert errors.worst_row == (1, 3, 2000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_is_counted_located_and_fails(bad: float) -> None:
    reference = torch.randn(2, 3, 10, 4)
    output = reference.clone()
    output[1, 2, 7, 3] = bad
    errors = compare(output, reference)
    assert (errors.nan_count, errors.inf_count) == ((1, 0) if math.isnan(bad) else (0, 1))
    assert errors.mismatched_nonfinite == 1
    assert not math.isfinite(errors.relative_l1)
    assert math.isnan(errors.cosine)
    assert math.isnan(errors.row_cosine_min)
    assert errors.worst_row == (1, 2, 7)
    assert errors.worst_head == (1, 2)
    for accuracy_class in ("exact", "quantised"):
        verdict = judge(errors, accuracy_class, Tolerance(1e9, 1e9))
        assert not verdict.passed
        assert verdict.sentence.startswith("1 elements are NaN or infinite")


def test_nan_that_the_reference_has_too_is_agreement() -> None:
    reference = rows([math.nan, 1.0], [math.inf, 2.0], [3.0, 4.0])
    errors = compare(reference.clone(), reference)
    assert (errors.nan_count, errors.inf_count, errors.mismatched_nonfinite) == (1, 1, 0)
    assert (errors.relative_l1, errors.max_abs, errors.row_cosine_min) == (0.0, 0.0, 1.0)
    assert judge(errors, "quantised").passed


def test_nan_that_only_the_reference_has_is_a_mismatch() -> None:
    errors = compare(rows([0.0, 1.0]), rows([math.nan, 1.0]))
    assert (errors.nan_count, errors.mismatched_nonfinite) == (0, 1)
    assert math.isnan(errors.max_abs)
    assert not judge(errors, "quantised").passed


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 3, 5), (1, 2, 0, 4)])
def test_what_cannot_be_compared_is_refused(shape: tuple[int, ...]) -> None:
    reference = torch.zeros(1, 2, 3, 4) if 0 not in shape else torch.zeros(shape)
    with pytest.raises(ValueError, match="cannot compare an output of shape"):
        compare(torch.zeros(shape), reference)


def test_summary_by_hand() -> None:
    found = summary(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert asdict(found) == pytest.approx(
        {"min": 1.0, "max": 6.0, "mean": 3.0, "std": math.sqrt((4 + 1 + 0 + 9) / 4)}
    )
    assert all(
        math.isnan(figure) for figure in asdict(summary(torch.tensor([1, math.nan]))).values()
    )
    with pytest.raises(ValueError, match="empty"):
        summary(torch.empty(0))


def long_call(dtype: torch.dtype, is_causal: bool = False) -> AttentionCall:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 2048, 64).to(dtype) for _ in range(3))
    return AttentionCall(query, key, value, is_causal=is_causal)


def exact_verdict(output: Tensor, call: AttentionCall) -> accuracy.Verdict:
    gold = attention(call)
    return judge(compare(output, gold), "exact", tolerance(call, same_dtype(call), gold))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_rule_passes_torch_and_fails_what_is_broken(
    dtype: torch.dtype, is_causal: bool
) -> None:
    call = long_call(dtype, is_causal)
    output = F.scaled_dot_product_attention(**call.arguments())
    gold = attention(call)
    allowed = tolerance(call, same_dtype(call), gold)

    def passes(candidate: Tensor) -> bool:
        return judge(compare(candidate, gold), "exact", allowed).passed

    assert passes(output)
    assert not passes(torch.zeros_like(output))
    for where in ((0, 1), (0, 1, 2000), (0, slice(None), slice(1984, None))):
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
    assert errors.mae < 3e-2  # an absolute tolerance would have to be smaller than that
    verdict = exact_verdict(torch.zeros_like(call.query), call)
    assert not verdict.passed
    assert verdict.sentence.startswith("max abs error 0.26 exceeds")


def test_exact_sentence_has_the_numbers() -> None:
    errors = replace(compare(rows([1.0]), rows([1.0])), max_abs=0.031)
    verdict = judge(errors, "exact", Tolerance(same_dtype_error=0.0019, rounding=0.0002))
    assert not verdict.passed
    assert verdict.sentence == (
        "max abs error 0.031 exceeds 0.004 = 2 × 0.0019 (same-dtype eager) + 0.0002 (rounding)"
    )
    assert judge(errors, "exact", Tolerance(0.0155, 0.0)).passed  # the limit itself passes


def test_exact_needs_a_tolerance() -> None:
    with pytest.raises(ValueError, match="tolerance"):
        judge(compare(rows([1.0]), rows([1.0])), "exact")


def test_tolerance_by_hand() -> None:
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    call = AttentionCall(one, one, one)
    gold = torch.full((1, 1, 1, 1), 1 + 2**-9, dtype=torch.float64)
    assert tolerance(call, one, gold) == Tolerance(2**-9, 2**-9)
    assert tolerance(call, one, gold).limit == 3 * 2**-9


def test_tolerance_ignores_what_overflowed() -> None:
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float16)
    call = AttentionCall(ones, ones, ones)
    overflowed = torch.tensor([math.inf, 1.0], dtype=torch.float16)[None, None, :, None]
    gold = torch.tensor([2.0, 1.0 + 2**-12], dtype=torch.float64)[None, None, :, None]
    assert tolerance(call, overflowed, gold) == Tolerance(2**-12, 2**-12)


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
    gold = attention(call)
    noise = torch.randn_like(gold) * gold.square().mean().sqrt()
    good = judge(compare(gold + 0.05 * noise, gold), "quantised")
    assert good.passed, good.sentence
    bad = judge(compare(gold + 0.3 * noise, gold), "quantised")
    assert not bad.passed
    assert "is below 0.99" in bad.sentence
    wrong_factor = judge(compare(gold * 1.2, gold), "quantised")
    assert not wrong_factor.passed
    assert "relative L1 0.2 exceeds 0.1" in wrong_factor.sentence
