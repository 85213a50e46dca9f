"""The tolerance of exact kernels, derived from the call's own data."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention_and_spread, same_dtype
from replay.accuracy.thresholds import ExactThresholds
from replay.accuracy.tolerance import ROWS_OF_A_HEAD, SHARED_NOISE, Tolerance, tolerance
from replay.accuracy.verdict import Expected, judge
from tests import factories
from tests.factories import one_head


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> AttentionCall:
    return AttentionCall(*(torch.ones(shape, dtype=dtype) for _ in range(3)))


def test_tolerance_equals_figures_by_hand() -> None:
    call = ones(1, 1, 1, 1)
    reference = torch.full((1, 1, 1, 1), 1 + 2**-9, dtype=torch.float64)
    spread = torch.zeros(1, 1, 1)
    found = tolerance(call, [call.query], reference, spread)
    smallest = 2.0**-133
    assert (found.same_dtype_error, found.rounding) == (2**-9, 2**-9)
    assert found.noise == pytest.approx((1 + 2**-9) * 2**-8 + smallest)
    assert found.limit(ExactThresholds()) == 4 * found.noise
    assert Tolerance(2**-9, 2**-9, noise=2**-10).limit(ExactThresholds()) == 3 * 2**-9
    doubled = ExactThresholds(same_dtype_factor=4, rounding_factor=8)
    assert found.limit(doubled) == 8 * found.noise
    assert Tolerance(2**-9, 2**-9).limit(doubled) == 5 * 2**-9


def test_tolerance_ignores_what_overflowed() -> None:
    call = ones(1, 1, 2, 1, dtype=torch.float16)
    overflowed = torch.tensor([math.inf, 1.0], dtype=torch.float16)[None, None, :, None]
    reference = torch.tensor([2.0, 1.0 + 2**-12], dtype=torch.float64)[None, None, :, None]
    found = tolerance(call, [overflowed], reference, torch.zeros(1, 1, 2))
    assert (found.same_dtype_error, found.rounding) == (2**-12, 2**-12)
    assert float(found.rows.eager) == pytest.approx(0.5, rel=1e-3)


def test_larger_error_of_two_forms_counts() -> None:
    """One output is wrong in a head; the other is wrong in the other head, and NaN in the first."""
    reference = torch.ones(1, 2, ROWS_OF_A_HEAD, 1, dtype=torch.float64)
    first, second = reference.clone(), reference.clone()
    first[0, 0, 3] += 1
    second[0, 1, 4] += 3
    second[0, 0] = math.nan
    call, spread = ones(1, 2, ROWS_OF_A_HEAD, 1), torch.zeros(1, 2, ROWS_OF_A_HEAD)
    for outputs in ([first, second], [second, first]):
        found = tolerance(call, outputs, reference, spread)
        assert found.same_dtype_error == 3
        assert found.rows.eager.flatten().tolist() == pytest.approx([2**8, 3 * 2**8])
        together = torch.tensor([1.0, 3.0]) * 2**8 / ROWS_OF_A_HEAD
        assert found.rows.eager_bias.flatten().tolist() == pytest.approx(together.tolist())
    with pytest.raises(ValueError, match="cannot compare"):
        tolerance(call, [first, second[:, :1]], reference, spread)


def test_row_limits_equal_figures_by_hand() -> None:
    """The noise u · √(‖o‖² + spread²) is 5 and 13 times 2⁻⁸; eager errs by twice the first."""
    reference = one_head([3.0, 0.0], [0.0, 5.0])
    eager = one_head([3.0, 0.0390625], [0.0, 5.0])
    spread = torch.tensor([[[4.0, 12.0]]])
    rows = tolerance(ones(1, 1, 2, 2), [eager], reference, spread).rows
    torch.testing.assert_close(rows.noise, torch.tensor([[[5.0, 13.0]]]).double() / 2**8)
    assert float(rows.eager) == pytest.approx(2.0)
    limits = rows.limits(ExactThresholds(same_dtype_factor=3, rounding_factor=10))
    torch.testing.assert_close(limits, 16 * rows.noise)


def test_bias_limits_equal_figures_by_hand() -> None:
    """Eager is too long by 2⁻⁷ and too short by 2⁻⁸ of 4; noise is 2⁻⁸: (2 − 1) / 2 in common."""
    reference = one_head([4.0, 0.0], [0.0, 4.0])
    eager = one_head([4.0 + 2**-5, 0.0], [0.0, 4.0 - 2**-6])
    rows = tolerance(ones(1, 1, 2, 2), [eager], reference, torch.zeros(1, 1, 2)).rows
    assert float(rows.eager) == pytest.approx(2.0)
    assert float(rows.eager_bias) == pytest.approx((2 - 1) / 2)
    thresholds = ExactThresholds(same_dtype_factor=2, rounding_factor=4)
    lengths = torch.tensor([[[4.0, 4.0]]], dtype=torch.float64)
    row = (4 + 2 * 2) * 2**-6 * 4
    shared = (4 * SHARED_NOISE + 2 * 0.5) * 2 * 2**-6 * 4
    found = float(rows.bias_limits(lengths, thresholds))
    assert found == pytest.approx(math.sqrt(2) * row + shared)


def test_rows_of_unknown_noise_add_no_bias() -> None:
    reference = one_head([4.0, 0.0], [math.inf, 0.0])
    rows = tolerance(ones(1, 1, 2, 2), [reference], reference, torch.zeros(1, 1, 2)).rows
    assert float(rows.eager_bias) == 0.0
    lengths = torch.tensor([[[4.0, math.inf]]], dtype=torch.float64)
    alone = rows.bias_limits(lengths, ExactThresholds())
    assert float(alone) == pytest.approx((4 + 4 * SHARED_NOISE) * 2**-6 * 4)


@pytest.mark.parametrize("length", [ROWS_OF_A_HEAD - 1, ROWS_OF_A_HEAD])
def test_heads_of_few_rows_share_their_worst(length: int) -> None:
    reference = torch.ones(1, 2, length, 4, dtype=torch.float64)
    eager = reference.clone()
    eager[0, 1, 3] += 1
    rows = tolerance(ones(1, 2, length, 4), [eager], reference, torch.zeros(1, 2, length)).rows
    first, second = rows.eager.flatten().tolist()
    assert second == pytest.approx(2**8)
    assert first == (second if length < ROWS_OF_A_HEAD else 0.0)


def test_float32_has_the_noise_of_its_sums() -> None:
    call = factories.random_call(q_heads=1, q_len=3, kv_len=100)
    reference, spread = attention_and_spread(call)
    eager = same_dtype(call)
    found = tolerance(call, eager, reference, spread)
    longest = [float(each.norm(dim=-1).max()) for each in (call.query, call.key)]
    terms = 10 + call.softmax_scale * longest[0] * longest[1]
    length = torch.hypot(reference.norm(dim=-1), spread)
    torch.testing.assert_close(found.rows.noise, 2**-24 * length * terms)
    rounding = (reference.float() - reference).abs().max() + 2**-24 * call.value.abs().max() * terms
    assert found.rounding == pytest.approx(float(rounding))


@pytest.mark.parametrize("keys", [2464, 16384])
@pytest.mark.parametrize("factor", [1.0, 3.0], ids=["in order", "worse"])
def test_float32_keys_may_be_added_one_after_another(keys: int, factor: float) -> None:
    """Equal terms have equal rounding errors, which add up: more than sums in blocks allow."""
    value = torch.full((1, 1, keys, 16), 23.7)
    call = AttentionCall(torch.zeros(1, 1, 4, 16), torch.zeros_like(value), value)
    expected = Expected.of(call)
    total = torch.tensor(0.0)
    for _ in range(keys):
        total += 23.7
    error = total.double() / keys - expected.reference
    assert error.abs().max() > expected.tolerance.rounding
    output = (expected.reference + factor * error).float()
    assert judge(output, expected, "exact").passed == (factor == 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_order_are_computed_only_if_they_may_explain_an_error(dtype: torch.dtype) -> None:
    limit = Tolerance(same_dtype_error=0.0, rounding=1e-6)
    expected = replace(Expected.of(factories.random_call(dtype=dtype)), tolerance=limit)
    for error in (0.0, 2e-6, 0.1):
        judge((expected.reference + error).to(dtype), expected, "exact")
        assert ("added_in_order" in vars(expected)) == (dtype.itemsize == 4 and error == 2e-6)
        vars(expected).pop("added_in_order", None)


@pytest.mark.parametrize("mask", [None, torch.tensor([True, True, False, True])])
def test_spread_equals_figures_by_hand(mask: Tensor | None) -> None:
    """With equal probabilities, the spread is √Σ(‖v‖/n)²."""
    value = torch.tensor([[3.0, 4.0], [0.0, 2.0], [6.0, 8.0], [1.0, 0.0]])[None, None]
    call = AttentionCall(torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 4, 8), value, attn_mask=mask)
    output, spread = attention_and_spread(call)
    squares = [25, 4, 100, 1] if mask is None else [25, 4, 1]
    assert float(spread) == pytest.approx(math.sqrt(sum(squares)) / len(squares))
    torch.testing.assert_close(output, attention_and_spread(call, block_elements=1)[0])
