"""Errors are compared with figures computed by hand."""

import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from replay.accuracy import errors
from replay.accuracy.errors import compare, row_errors, summary
from tests.factories import one_head


def flat(errors: errors.Errors) -> dict[str, float]:
    """Return the figures as numbers, for `pytest.approx`."""
    figures = asdict(errors)
    for name in ("worst_row", "worst_head"):
        figures |= {f"{name}{place}": index for place, index in enumerate(figures.pop(name))}
    return figures


def test_errors_equal_figures_by_hand() -> None:
    errors = compare(one_head([3.0, 4.0], [0.0, 1.0]), one_head([3.0, 5.0], [1.0, 0.0]))
    assert errors.cosine == pytest.approx(29 / math.sqrt(26 * 35))
    assert errors.relative_l1 == pytest.approx(3 / 9)
    assert errors.mse == pytest.approx(3 / 4)
    assert errors.rmse == pytest.approx(math.sqrt(3 / 4))
    assert errors.mae == pytest.approx(3 / 4)
    assert errors.max_abs == 1.0
    assert (errors.worst_row, errors.worst_head) == ((0, 0, 1), (0, 0))
    assert errors.worst_head_relative_l1 == errors.relative_l1
    assert errors.worst_head_cosine == pytest.approx(errors.cosine)


def test_zero_rows_have_defined_figures() -> None:
    assert compare(one_head([0.0, 0.0]), one_head([0.0, 0.0])).row_cosine_min == 1.0
    assert compare(one_head([0.0, 0.0]), one_head([0.0, 0.0])).relative_l1 == 0.0
    assert compare(one_head([0.0, 0.0]), one_head([0.0, 1.0])).cosine == 0.0
    only_output = compare(one_head([0.0, 1.0]), one_head([0.0, 0.0]))
    assert (only_output.cosine, only_output.relative_l1) == (0.0, math.inf)


def test_chunks_do_not_change_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    output, reference = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 50, 8)
    whole = flat(compare(output, reference))
    whole_summary = asdict(summary(output))
    monkeypatch.setattr(errors, "CHUNK_ELEMENTS", 2 * 3 * 8 * 7)
    assert flat(compare(output, reference)) == pytest.approx(whole, rel=1e-12)
    assert asdict(summary(output)) == pytest.approx(whole_summary, rel=1e-12)


def test_percentiles_agree_with_torch() -> None:
    output, reference = torch.randn(1, 4, 250, 16), torch.randn(1, 4, 250, 16)
    cosines = F.cosine_similarity(output.double(), reference.double(), dim=-1).flatten()
    errors = compare(output, reference)
    assert errors.row_cosine_p1 == pytest.approx(cosines.quantile(0.01).item())
    assert errors.row_cosine_p10 == pytest.approx(cosines.quantile(0.1).item())
    assert errors.row_cosine_min == pytest.approx(cosines.min().item())


def test_broken_head_and_row_are_named() -> None:
    reference = torch.randn(2, 30, 64, 16)
    output = reference.clone()
    output[1, 17] = reference[1, 16]
    output[1, 3, 40] = -reference[1, 3, 40]
    errors = compare(output, reference)
    assert errors.cosine > 0.95
    assert (errors.worst_head, errors.worst_row) == ((1, 17), (1, 3, 40))
    assert abs(errors.worst_head_cosine) < 0.2
    assert errors.worst_head_relative_l1 > 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_element_is_counted_and_located(bad: float) -> None:
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


def test_nan_that_the_reference_has_too_is_agreement() -> None:
    reference = one_head([math.nan, 1.0], [math.inf, 2.0], [3.0, 4.0])
    errors = compare(reference.clone(), reference)
    assert (errors.nan_count, errors.inf_count, errors.mismatched_nonfinite) == (1, 1, 0)
    assert (errors.relative_l1, errors.max_abs, errors.row_cosine_min) == (0.0, 0.0, 1.0)


def test_nan_that_only_the_reference_has_is_a_mismatch() -> None:
    errors = compare(one_head([0.0, 1.0]), one_head([math.nan, 1.0]))
    assert (errors.nan_count, errors.mismatched_nonfinite) == (0, 1)
    assert math.isnan(errors.max_abs)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 3, 5), (1, 2, 0, 4)])
def test_incomparable_tensors_are_refused(shape: tuple[int, ...]) -> None:
    reference = torch.zeros(1, 2, 3, 4) if 0 not in shape else torch.zeros(shape)
    with pytest.raises(ValueError, match="cannot compare an output of shape"):
        compare(torch.zeros(shape), reference)


def test_summary_equals_figures_by_hand() -> None:
    found = summary(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert asdict(found) == pytest.approx(
        {"min": 1.0, "max": 6.0, "mean": 3.0, "std": math.sqrt((4 + 1 + 0 + 9) / 4)}
    )
    assert all(
        math.isnan(figure) for figure in asdict(summary(torch.tensor([1, math.nan]))).values()
    )
    with pytest.raises(ValueError, match="empty"):
        summary(torch.empty(0))


def test_places_of_errors_equal_figures_by_hand() -> None:
    reference = torch.ones(1, 2, 4, 2)
    output = reference.clone()
    output[0, 1, 2] = 3.0
    output[0, 0, 0, 0] = 1.5
    where = row_errors(output, reference).where()
    assert where.relative_l1 == ((0.25, 0.0, 0.0, 0.0), (0.0, 0.0, 2.0, 0.0))
    assert (where.worst, where.typical) == (2.0, 0.0)
    assert (where.head, where.queries) == ((0, 1), (2, 2))


def test_places_of_errors_include_non_finite_elements() -> None:
    reference = torch.ones(1, 1, 2, 2)
    output = reference.clone()
    output[0, 0, 1, 0] = math.nan
    where = row_errors(output, reference).where()
    assert (where.queries, where.typical) == ((1, 1), 0.0)
    assert math.isnan(where.worst)
    where = row_errors(output, torch.zeros(1, 1, 2, 2)).where()
    assert where.relative_l1[0][0] == math.inf
