"""Statistics against numbers computed by hand."""

from __future__ import annotations

import random

import pytest

from replay.timing.statistics import paired_speedup, percentile, summarize


def test_summary_by_hand() -> None:
    summary = summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.p50, summary.n) == (3.0, 5)
    assert summary.p10 == pytest.approx(1.4)  # position 0.4 between 1 and 2
    assert summary.p90 == pytest.approx(4.6)
    assert summary.iqr == pytest.approx(4.0 - 2.0)
    assert summary.samples == (5.0, 1.0, 3.0, 2.0, 4.0)


def test_even_number_of_samples_has_its_median_between() -> None:
    assert percentile([1.0, 2.0, 4.0, 10.0], 50) == 3.0
    assert percentile([1.0, 2.0, 4.0, 10.0], 0) == 1.0
    assert percentile([1.0, 2.0, 4.0, 10.0], 100) == 10.0


def test_one_sample_is_all_its_percentiles() -> None:
    summary = summarize([7.0])
    assert (summary.p10, summary.p50, summary.p90, summary.iqr, summary.n) == (7, 7, 7, 0, 1)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_constant_ratio_has_no_width() -> None:
    speedup = paired_speedup([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert (speedup.ratio, speedup.low, speedup.high) == (2.0, 2.0, 2.0)
    assert speedup.verdict == "faster"


def test_drift_that_both_share_cancels() -> None:
    clock = [1.0 + 0.1 * index for index in range(20)]
    speedup = paired_speedup([3 * tick for tick in clock], [4 * tick for tick in clock])
    assert speedup.ratio == pytest.approx(0.75)
    assert speedup.verdict == "slower"


def test_ratio_is_the_median_of_round_ratios_not_the_ratio_of_medians() -> None:
    # Round ratios 10, 1, 0.5; medians 2 and 2.
    speedup = paired_speedup([10.0, 2.0, 1.0], [1.0, 2.0, 2.0])
    assert speedup.ratio == 1.0
    # Of the 27 resamples of three rounds, 7 have each extreme as their median: both ends of the
    # interval lie there.
    assert (speedup.low, speedup.high, speedup.verdict) == (0.5, 10.0, "tie")


def test_noise_is_a_tie_and_the_interval_holds_the_true_ratio() -> None:
    noise = random.Random(0)
    baseline = [1 + 0.05 * noise.random() for _ in range(30)]
    same = [1 + 0.05 * noise.random() for _ in range(30)]
    assert paired_speedup(baseline, same).verdict == "tie"
    tenth_faster = paired_speedup([1.1 * each for each in baseline], same)
    assert tenth_faster.low < 1.1 < tenth_faster.high
    assert tenth_faster.verdict == "faster"


def test_interval_covers_about_95_percent() -> None:
    noise = random.Random(1)
    covered = 0
    for seed in range(100):
        ratios = [noise.lognormvariate(0, 0.1) for _ in range(30)]
        speedup = paired_speedup(ratios, [1.0] * 30, seed)
        covered += speedup.low <= 1.0 <= speedup.high
    assert 0.90 <= covered / 100 <= 0.99


def test_seed_decides() -> None:
    noise = random.Random(2)
    baseline, candidate = ([noise.random() + 1 for _ in range(12)] for _ in range(2))
    assert paired_speedup(baseline, candidate, 5) == paired_speedup(baseline, candidate, 5)


def test_only_common_rounds_are_paired() -> None:
    assert paired_speedup([2.0] * 3, [1.0] * 3 + [9.0] * 9).ratio == 2.0


def test_too_few_pairs_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 paired rounds; a comparison needs 3"):
        paired_speedup([1.0, 1.0], [1.0, 1.0, 1.0])
