"""The estimated duration of a replay, and the history of earlier replays."""

from dataclasses import replace

import pytest

from replay.bench.settings import Settings
from replay.distribution.estimate import (
    Rates,
    call_seconds,
    expected_seconds,
    flops,
    kernel_work,
    together,
)
from replay.kernels.registry import find
from replay.timing.flops import flops as exact_flops
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload
from tests.factories import made_workload

RATES = Rates(flops=1e12, reference_flops=1e11, sample_seconds=1e-4, kernel_seconds=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_are_known_before_a_call_is_read(is_causal: bool) -> None:
    spec = Spec(2, 4, 2, 512, 512, 64, 32, is_causal)
    found = flops(random_workload("a", "b", spec, 0).source.metadata())
    assert found == pytest.approx(exact_flops(spec.without_values()), rel=0.01)


def test_calls_with_more_to_do_take_longer(quick: Settings) -> None:
    settings = replace(quick, rounds=30, max_seconds=5.0)
    kernels = {"this": [find("torch-math"), find("torch-flash")], "other": [find("torch-math")]}
    calls = [
        random_workload(str(length), "b", Spec(1, 8, 8, length, length, 128, 128), 0)
        for length in (1024, 4096)
    ]
    unknown = made_workload("unknown", lambda device: pytest.fail("loaded"))
    found = expected_seconds([*calls, unknown], kernels, settings, RATES)
    assert list(found) == ["1024", "4096", "unknown"]
    assert found["4096"] > found["1024"] > 3 * RATES.kernel_seconds
    assert found["unknown"] == pytest.approx((found["1024"] + found["4096"]) / 2)
    fewer = expected_seconds(calls, {"this": kernels["this"][:1]}, settings, RATES)
    assert fewer["4096"] < found["4096"]
    assert expected_seconds([unknown], kernels, settings, RATES) == {"unknown": 1.0}
    names, forms = kernel_work(calls, kernels)
    assert names == ["torch-math", "torch-flash", "torch-math@other"]
    assert forms["1024"] != forms["4096"]


def test_limit_of_rounds_limits_the_estimate(quick: Settings) -> None:
    def seconds(flops: float, **changes: float) -> float:
        settings = replace(quick, **{"rounds": 30, "max_seconds": 20.0, **changes})  # type: ignore[arg-type]
        return call_seconds(flops, 1, settings, RATES)

    second = RATES.flops  # work of one second; the limit applies to a run
    assert seconds(second, max_seconds=10.0) < seconds(second)
    assert seconds(second, rounds=6) == pytest.approx(seconds(second, max_seconds=1.0))
    assert seconds(second, calls_before=4) > seconds(second)
    # Each part has its own limit: six samples of 1, 3.5 and 3.5 s, and their warm-ups.
    parts = {"rounds": 6, "max_seconds": 1.0}
    more = seconds(second, backward=True, **parts) - seconds(second, **parts)
    checks = 3 * 3.5 + 5 * 3.5 * RATES.flops / RATES.reference_flops
    assert more == pytest.approx(checks + 2 * (6 * 3.5 + 2.0), rel=0.01)


def test_baseline_own_processes_and_other_programs_take_time(quick: Settings) -> None:
    settings = replace(quick, rounds=30, max_seconds=5.0)
    calls = [random_workload("a", "b", Spec(1, 8, 8, 1024, 1024, 128, 128), 0)]
    math, default = find("torch-math"), find("torch-default")
    alone = expected_seconds(calls, {"this": [math]}, settings, RATES)
    assert alone == expected_seconds(calls, {"this": [math, default]}, settings, RATES)
    own = expected_seconds(calls, {"this": [replace(math, source="mine.py")]}, settings, RATES)
    assert own["a"] > alone["a"] + 0.5
    busy = expected_seconds(calls, {"this": [math]}, settings, replace(RATES, is_busy=True))
    assert 2 * 5.0 < busy["a"] < alone["a"] + 2 * 5.0


def test_devices_share_several_calls_but_not_one() -> None:
    assert together([4.0, 2.0, 2.0], 1) == 8.0
    assert together([4.0, 2.0, 2.0], 2) == 4.0
    assert together([6.0, 1.0], 2) == 6.0
    assert together([], 2) == 0.0
