"""Changes of speed in simulated runs whose true change is known."""

from dataclasses import replace
from typing import Any

import pytest

from replay.comparison.comparison import Comparison, compare, measured_spread
from replay.comparison.row_matching import ComparisonError, Difference, Run
from replay.comparison.speed_change import (
    NO_SPREAD,
    SpeedChange,
    Spread,
    choose_basis,
    compare_speed,
    judge,
)
from replay.rows.row import HERE as ENVIRONMENT
from replay.rows.row import KernelId
from replay.timing.statistics import MedianInterval
from tests.replay.comparison.simulated import BASELINE, HERE, run

SLOWER = 1.05


def of_rows(found: Comparison) -> list[SpeedChange]:
    return [each.speed for each in found.pairs if each.speed is not None]


def of_kernels(found: Comparison) -> dict[str, SpeedChange]:
    return {each.kernel.name: each.speed for each in found.kernels if each.speed is not None}


@pytest.mark.parametrize(
    ("low", "high", "spread", "verdict"),
    [
        (0.98, 1.02, 0.0, ("same", "within-3-percent")),
        (0.98, 1.02, 0.01, ("same", "within-3-percent")),
        (0.94, 1.05, 0.1, ("same", "within-spread")),
        (1.01, 1.1, 0.0, ("fast", "interval-above-1")),
        (1.01, 1.1, 0.02, ("inconclusive", "interval-includes-1")),
        (0.9, 0.99, 0.0, ("slow", "interval-below-1")),
        (0.9, 0.99, 0.02, ("inconclusive", "interval-includes-1")),
        (0.8, 0.9, 0.1, ("slow", "interval-below-1")),
        (0.8, 0.92, 0.1, ("inconclusive", "interval-includes-1")),
        (0.9, 1.1, 0.0, ("inconclusive", "noisy")),
        (0.98, 1.05, 0.0, ("inconclusive", "interval-includes-1")),
    ],
)
def test_verdict_follows_interval_and_spread(
    low: float, high: float, spread: float, verdict: tuple[str, str]
) -> None:
    assert judge(MedianInterval(low, high), spread) == verdict


def test_equal_runs_are_the_same_though_the_machine_drifts() -> None:
    kernels = {f"k{at}": 0.4 + 0.1 * at for at in range(8)}
    before, after = run("before", kernels), run("after", kernels, drift=0.1)
    found = compare(before, after, NO_SPREAD)
    verdicts = [each.verdict for each in of_rows(found)]
    assert len(verdicts) == 8 * 12
    assert verdicts.count("same") >= 0.95 * len(verdicts)
    assert {each.verdict for each in of_kernels(found).values()} == {"same"}
    assert found.baseline_time.verdict == "slow"
    by_time = compare(before, after, NO_SPREAD, "time")
    assert {each.verdict for each in of_rows(by_time)} == {"slow"}


def test_a_kernel_that_takes_5_percent_longer_is_found_and_no_other() -> None:
    before = run("before", {"good": 0.5, "bad": 0.5})
    after = run("after", {"good": 0.5, "bad": 0.5 * SLOWER}, drift=-0.1)
    found = compare(before, after, Spread(0.01, "test"))
    for pair in found.pairs:
        if pair.before.kernel != BASELINE:
            assert pair.speed.verdict == ("slow" if pair.before.kernel == "bad" else "same")
    overall = of_kernels(found)
    assert set(overall) == {"good", "bad"}
    assert overall["bad"].verdict == "slow"
    assert overall["bad"].ratio == pytest.approx(1 / SLOWER, abs=0.005)
    assert overall["bad"].is_slower_by(0.03)
    assert not overall["bad"].is_slower_by(0.06)


def test_rows_that_each_are_too_noisy_say_something_together() -> None:
    before = run("before", {"bad": 0.5}, kernel_noise=0.06, calls=60)
    after = run("after", {"bad": 0.5 * SLOWER}, kernel_noise=0.06, calls=60)
    found = compare(before, after, NO_SPREAD)
    verdicts = [each.verdict for each in of_rows(found)]
    assert verdicts.count("inconclusive") > len(verdicts) / 2
    assert of_kernels(found)["bad"].verdict == "slow"


def test_calls_that_changed_differently_do_not_widen_the_interval_beyond_them() -> None:
    """Differences between kinds of calls must not count as noise between adjacent rounds."""
    before = run("before", {"a": 0.5}, calls=20)
    after = run("after", {"a": 0.55}, calls=20)
    slower = run("slower", {"a": 0.75}, calls=20)
    mixed = [*slower.rows[:20], *after.rows[20:]]
    found = of_kernels(compare(before, Run("after", mixed), NO_SPREAD))["a"]
    assert found.verdict == "slow"
    assert found.low > 0.65


def test_few_calls_and_few_rounds_have_no_interval() -> None:
    before, after = (run(name, {"a": 0.5}, calls=5, rounds=5) for name in ("before", "after"))
    found = compare(before, after, NO_SPREAD)
    assert {each.reason for each in of_rows(found)} == {"too-few-rounds"}
    assert {each.reason for each in of_kernels(found).values()} == {"too-few-calls"}


@pytest.mark.parametrize(
    ("changed", "basis"),
    [
        ((), "speed-up"),
        (("python",), "speed-up"),
        (("torch",), "time"),
        (("threads",), "time"),
        (("device", "torch"), "speed-up"),
    ],
)
def test_basis_depends_on_what_changed(changed: tuple[str, ...], basis: str) -> None:
    rows = run("before", {"a": 0.5}).rows
    differing = [Difference(ENVIRONMENT, field, "1", "2") for field in changed]
    differing.append(Difference("other", "torch", "1", "2"))
    assert choose_basis(list(zip(rows, rows, strict=True)), differing) == basis


def test_without_a_common_baseline_times_are_compared() -> None:
    rows = run("before", {"a": 0.5}).rows
    others = [
        replace(each, speedup=each.speedup and replace(each.speedup, vs="another")) for each in rows
    ]
    assert choose_basis(list(zip(rows, others, strict=True)), []) == "time"
    assert compare_speed(rows[1], others[1], "speed-up", 0.0) is None


@pytest.mark.parametrize("fault", [{"status": "inaccurate"}, {"flags": ("unconfirmed: …",)}])
def test_a_kernel_without_a_valid_time_in_one_run_has_no_speed(fault: dict[str, Any]) -> None:
    good = run("before", {"a": 0.5}).rows[1]
    wrong = replace(good, **fault)
    assert compare_speed(good, good, "time", 0.0) is not None
    assert compare_speed(good, wrong, "time", 0.0) is None
    assert compare_speed(wrong, good, "speed-up", 0.0) is None


def test_across_devices_speed_ups_are_compared_and_times_refused() -> None:
    before = run("before", {"a": 0.5})
    after = run("after", {"a": 0.5}, drift=1.0, machine=replace(HERE, device="GPU 2"))
    found = compare(before, after, NO_SPREAD)
    assert found.basis == "speed-up"
    assert found.baseline_time is None
    assert {each.verdict for each in of_rows(found)} == {"same"}
    with pytest.raises(ComparisonError, match="leave out --of time"):
        compare(before, after, NO_SPREAD, "time")


def test_a_kernel_that_repeats_better_than_others_is_held_to_its_own_spread() -> None:
    steady = {name: run(name, {"steady": 0.5}).rows for name in ("before", "again")}
    noisy = {name: run(name, {"noisy": 0.5}, kernel_noise=0.2).rows[1::2] for name in steady}
    before, again = (Run(name, [*steady[name], *noisy[name]]) for name in steady)
    spread = measured_spread(before, again)
    assert spread.of(KernelId("steady")) < 0.01 < 0.03 < spread.of(KernelId("noisy"))
    assert spread.of(KernelId("unknown")) == spread.share
    slower = run("after", {"steady": 0.52}).rows
    found = compare(before, Run("after", [*slower, *noisy["again"]]), spread)
    verdicts = {name: each.verdict for name, each in of_kernels(found).items()}
    assert verdicts == {"steady": "slow", "noisy": "same"}


def test_the_spread_of_two_equal_runs_covers_95_percent_of_their_rows() -> None:
    kernels = {f"k{at}": 0.5 for at in range(5)}
    first, again = (run(name, kernels, kernel_noise=0.03) for name in ("first", "again"))
    spread = measured_spread(first, again)
    assert spread.source == "again"
    assert {kernel.name for kernel in spread.of_kernels} == set(kernels)
    assert 0.005 < spread.share < 0.05
    ratios = [each.ratio for each in of_rows(compare(first, again, NO_SPREAD))]
    within = [1 / (1 + spread.share) <= each <= 1 + spread.share for each in ratios]
    assert sum(within) == pytest.approx(0.95 * len(within), abs=1)
