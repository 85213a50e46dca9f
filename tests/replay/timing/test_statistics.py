"""Statistics are compared with numbers computed by hand."""

import math
from dataclasses import replace

import pytest

from replay.rows.row import Speedup
from replay.timing.statistics import (
    MedianInterval,
    median_interval,
    paired_speedup,
    process_factor,
    speed_verdict,
    speedup_between,
    summarize,
)


def test_summary_equals_figures_by_hand() -> None:
    summary = summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.p50, summary.n) == (3.0, 5)
    assert summary.p10 == pytest.approx(1.4)  # 0.4 of the way from 1 to 2
    assert summary.p90 == pytest.approx(4.6)
    assert summary.iqr == pytest.approx(4.0 - 2.0)
    assert summary.samples == (5.0, 1.0, 3.0, 2.0, 4.0)


def test_drift_that_both_share_cancels() -> None:
    clock = [1.0 + 0.1 * index for index in range(20)]
    speedup = paired_speedup([3 * tick for tick in clock], [4 * tick for tick in clock])
    assert speedup.ratio == pytest.approx(0.75)
    assert (speedup.verdict, speedup.reason) == ("slow", "interval-below-1")


def test_ratio_is_the_median_of_round_ratios_not_the_ratio_of_medians() -> None:
    # The ratios of the rounds are 10, 1 and 0.5; both medians are 2.
    assert paired_speedup([10.0, 2.0, 1.0], [1.0, 2.0, 2.0]).ratio == 1.0


@pytest.mark.parametrize(
    ("ms", "control", "low", "high", "verdict"),
    [
        (2.4, [], 2.0 / 2.4, 2.0 / 2.4, "slow"),
        (2.4, [2.4] * 20, 2.0 / 2.4, 1.0, "inconclusive"),
        (1.8, [1.8] * 20, 1.0, 2.0 / 1.8, "inconclusive"),
        (1.8, [1.9] * 20, 1.9 / 1.8, 2.0 / 1.8, "fast"),
        # A kernel can falsify its control, but a large difference stays a difference.
        (4.0, [40.0] * 20, 0.5, 0.65, "slow"),
        (1.0, [0.1] * 20, 2.0 / 1.3, 2.0, "fast"),
    ],
)
def test_interval_includes_the_difference_between_processes(
    ms: float, control: list[float], low: float, high: float, verdict: str
) -> None:
    baseline, factor = summarize([2.0] * 20), process_factor(control, [2.0] * 20)
    candidate = replace(summarize([ms] * 20), process_factor=factor)
    found = speedup_between((baseline, candidate))
    assert found.ratio == pytest.approx(2.0 / ms)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.verdict == verdict
    # Kernels of one process have the same factor.
    assert speedup_between((candidate, candidate)).low == 1.0


@pytest.mark.parametrize(
    ("low", "high", "verdict", "reason"),
    [
        (1.01, 1.02, "same", "within-3-percent"),
        (0.98, 1.029, "same", "within-3-percent"),
        (1.01, 1.10, "fast", "interval-above-1"),
        (1.03, 1.031, "fast", "interval-above-1"),
        (1 / 1.03, 0.99, "slow", "interval-below-1"),
        (0.5, 0.9, "slow", "interval-below-1"),
        (0.99, 1.03, "inconclusive", "interval-includes-1"),
        (0.9, 1.0, "inconclusive", "interval-includes-1"),
        (0.9, 1.1, "inconclusive", "noisy"),
    ],
)
def test_verdict_follows_the_interval(low: float, high: float, verdict: str, reason: str) -> None:
    assert speed_verdict(low, high) == (verdict, reason)


def test_below_six_rounds_there_is_no_interval() -> None:
    assert paired_speedup([2.0] * 5, [1.0] * 5) == Speedup(
        2.0, None, None, "inconclusive", "too-few-rounds"
    )
    assert not paired_speedup([2.0] * 5, [1.0] * 5).holds(2.0)
    assert paired_speedup([2.0] * 6, [1.0] * 6).verdict == "fast"


def no_trend(count: int) -> list[float]:
    """Return 1 … count with distant numbers next to each other: 1, count, 2, count - 1 …"""
    ends = [(low + 1, count - low) for low in range(count // 2)]
    ordered = [float(each) for pair in ends for each in pair]
    return ordered + [(count + 1) / 2] * (count % 2)


@pytest.mark.parametrize(
    ("count", "rank"),
    # 2 · P(X < rank) for X ~ Binomial(count, 1/2) is 1/32, 1/64, 22/1024, 0.0161, 0.0210, 0.0247.
    # For the next rank, it is 7/32, 1/8, 112/1024, 0.0428, 0.0352, 0.0291.
    [(6, 1), (7, 1), (10, 2), (30, 9), (100, 39), (1000, 465)],
)
def test_ends_of_the_interval_are_order_statistics(count: int, rank: int) -> None:
    assert median_interval(no_trend(count)) == MedianInterval(rank, count + 1 - rank)


def test_ranks_beyond_the_samples_are_extrapolated() -> None:
    trend = [1.1**index for index in range(8)]
    # By hand: the ranks' autocorrelation is 0.625, plus (1 + 3 · 0.625) / 8 + 4 / 8, more than
    # 0.75; so the interval is 4.5 ± √7 · 3.5 ranks, where only ± 3.5 ranks exist.
    interval = median_interval(trend)
    beyond = 3.5 * (math.sqrt(7) - 1)
    assert interval.low == pytest.approx(1.1**-beyond)
    assert interval.high == pytest.approx(1.1 ** (7 + beyond))


def test_correlated_rounds_count_less() -> None:
    runs = [1.0 + index // 10 + 0.01 * (index % 10) for index in range(100)]
    correlated, spread = median_interval(runs), median_interval(no_trend(100))
    assert correlated.high - correlated.low > 0.4 * 10
    assert spread.high - spread.low < 0.25 * 100


def test_equal_ratios_show_no_correlation() -> None:
    few_values = [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0] * 3
    interval = median_interval(few_values)
    assert interval == MedianInterval(1.0, 1.0)


def test_calls_are_correlated_within_themselves() -> None:
    """A difference between two calls must not look like a correlation of their rounds."""
    a, b = no_trend(30), [100 + each for each in no_trend(30)]
    together = median_interval(a, b)
    one_after_the_other = median_interval(a + b)
    assert together.high - together.low < one_after_the_other.high - one_after_the_other.low
    # In 60 samples, rank 21 has 97.5 %; ranks 1 to 30 belong to the first call.
    assert together == MedianInterval(21, 110)
