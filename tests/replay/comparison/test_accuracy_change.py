"""Changes of accuracy are distinguished from the noise of non-deterministic kernels."""

import math
from dataclasses import replace

import pytest

from replay.comparison.accuracy_change import AccuracyChange, compare_accuracy
from replay.rows.row import Row, Status
from tests.factories import row
from tests.replay.comparison.simulated import judged, noisy


def change(before: Row, after: Row) -> AccuracyChange:
    found = compare_accuracy(before, after)
    assert found is not None
    return found


def told(before: Row, after: Row) -> tuple[str, str]:
    found = change(before, after)
    return found.verdict, found.reason


def test_kernel_that_repeats_exactly_is_identical() -> None:
    assert told(judged(noisy(4, 16)), judged(noisy(4, 16))) == ("same", "identical")


def test_noise_is_no_change() -> None:
    for seed in range(50):
        before, after = (noisy(8, 64, seed=2 * seed + at) for at in (0, 1))
        found = told(judged(before), judged(after, relative_l1=1.01e-3))
        assert found == ("same", "within-10-percent")


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.1, ("worse", "error-grew")),
        (1.3, ("worse", "error-grew")),
        (0.7, ("better", "error-shrank")),
    ],
)
def test_errors_that_change_everywhere_have_a_verdict_and_ratio(
    factor: float, verdict: tuple[str, str]
) -> None:
    after = noisy(4, 64, level=1e-3 * factor, seed=1)
    found = change(judged(noisy(4, 64)), judged(after, relative_l1=1e-3 * factor))
    assert (found.verdict, found.reason) == verdict
    assert found.ratio == pytest.approx(factor, rel=0.05)
    assert found.low < factor < found.high


def test_a_place_that_goes_wrong_alone_is_found_and_named() -> None:
    before, after = noisy(8, 64), noisy(8, 64, seed=1)
    after[3][7] *= 5
    assert told(judged(before), judged(after)) == ("worse", "error-grew-in-one-place")
    assert change(judged(before), judged(after)).place == (3, 7)


def test_a_place_among_others_that_scatter_as_much_is_noise() -> None:
    before, after = (noisy(8, 64, noise=0.4, seed=seed) for seed in (0, 1))
    ratios = [
        late / early
        for olds, news in zip(before, after, strict=True)
        for early, late in zip(olds, news, strict=True)
    ]
    assert max(ratios) > 4
    assert told(judged(before), judged(after)) == ("inconclusive", "interval-includes-1")


def test_a_place_whose_error_stays_tiny_does_not_matter() -> None:
    before, after = noisy(8, 64), noisy(8, 64, seed=1)
    before[3][7], after[3][7] = 1e-6, 1e-5
    assert told(judged(before), judged(after)) == ("same", "within-10-percent")


def test_place_that_gets_its_first_error_is_found() -> None:
    before, after = noisy(4, 16), noisy(4, 16)
    before[2][1], after[2][1] = 0.0, 1.0
    found = change(judged(before), judged(after))
    assert (found.reason, found.place) == ("error-grew-in-one-place", (2, 1))
    assert math.isinf(found.ratio)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("ok", "inaccurate", ("worse", "now-inaccurate")),
        ("not-timed", "inaccurate", ("worse", "now-inaccurate")),
        ("inaccurate", "ok", ("better", "now-ok")),
    ],
)
def test_status_goes_before_figures(old: Status, new: Status, verdict: tuple[str, str]) -> None:
    assert told(judged(noisy(4, 16), status=old), judged(noisy(4, 16), status=new)) == verdict


@pytest.mark.parametrize("count", ["nan_count", "inf_count", "mismatched_nonfinite"])
def test_nan_and_infinities_are_counted(count: str) -> None:
    clean, broken = judged(noisy(4, 16)), judged(noisy(4, 16), **{count: 3})
    assert told(clean, broken) == ("worse", "more-nan")
    assert told(broken, clean) == ("better", "fewer-nan")


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.5, ("inconclusive", "too-few-places")),
        (2.5, ("worse", "error-grew")),
        (0.3, ("better", "error-shrank")),
    ],
)
def test_few_places_need_a_doubled_error(factor: float, verdict: tuple[str, str]) -> None:
    after = judged([[1e-3 * factor] * 2], relative_l1=1e-3 * factor)
    assert told(judged([[1e-3] * 2]), after) == verdict


def test_unjudged_rows_have_no_accuracy_change() -> None:
    assert compare_accuracy(judged(), replace(row("mine"), status="crash")) is None
