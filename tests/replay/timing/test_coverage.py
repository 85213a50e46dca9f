"""Coverage of intervals in simulated rounds of two kernels whose true ratio is 1.

The machine's noise is one series, which both kernels sample in turn and in shuffled order. In
addition, each kernel has its own series of noise.
"""

import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from replay.timing.statistics import median_interval, paired_speedup, ratio_interval

ROUNDS = (6, 10, 30, 100)
RUNS = 600

Times = tuple[list[float], list[float]]
Course = Callable[[random.Random, int], list[float]]
"""Function that returns the logarithm of each sample's slow-down."""


def independent(noise: random.Random, count: int) -> list[float]:
    return [noise.gauss(0, 0.02) for _ in range(count)]


def drifting(noise: random.Random, count: int) -> list[float]:
    return [0.3 * at / count + noise.gauss(0, 0.005) for at in range(count)]


def bursts(noise: random.Random, count: int) -> list[float]:
    """Return a first-order autoregressive series."""
    course = [noise.gauss(0, 0.02)]
    while len(course) < count:
        course.append(0.6 * course[-1] + 0.8 * noise.gauss(0, 0.02))
    return course


def periodic(noise: random.Random, count: int) -> list[float]:
    period, phase = noise.uniform(3, 30), noise.uniform(0, math.tau)
    return [
        0.02 * math.sin(math.tau * at / period + phase) + noise.gauss(0, 0.01)
        for at in range(count)
    ]


def outliers(noise: random.Random, count: int) -> list[float]:
    return [noise.gauss(0, 0.01) + (noise.random() < 0.1) * noise.random() for _ in range(count)]


def of_the_machine(course: Course) -> Callable[[random.Random, int], Times]:
    def times(noise: random.Random, rounds: int) -> Times:
        slow = course(noise, 2 * rounds)
        pairs = [slow[at : at + 2] for at in range(0, 2 * rounds, 2)]
        for pair in pairs:
            noise.shuffle(pair)
        return [math.exp(a) for a, _ in pairs], [math.exp(b) for _, b in pairs]

    return times


def of_each_kernel(course: Course) -> Callable[[random.Random, int], Times]:
    def times(noise: random.Random, rounds: int) -> Times:
        a, b = ([math.exp(each) for each in course(noise, rounds)] for _ in range(2))
        return a, b

    return times


SCENES = {
    "independent": of_each_kernel(independent),
    "outliers": of_each_kernel(outliers),
    "drifting machine": of_the_machine(drifting),
    "bursts of the machine": of_the_machine(bursts),
    "periodic machine": of_the_machine(periodic),
    "bursts of each kernel": of_each_kernel(bursts),
    "periodic kernels": of_each_kernel(periodic),
}


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("scene", SCENES)
def test_intervals_cover_the_true_ratio_in_95_percent(scene: str, rounds: int) -> None:
    noise = random.Random(f"{scene}, {rounds} rounds")
    covered = sum(paired_speedup(*SCENES[scene](noise, rounds)).holds(1.0) for _ in range(RUNS))
    assert covered >= 0.95 * RUNS


@pytest.mark.parametrize("rounds", [6, 30])
@pytest.mark.parametrize("scene", ["independent", "outliers", "bursts of each kernel"])
def test_ratios_of_two_runs_are_covered_in_95_percent(scene: str, rounds: int) -> None:
    """Disturbances of one run do not affect the other run."""
    noise = random.Random(f"{scene}, two runs of {rounds} rounds")
    covered = 0
    for _ in range(RUNS):
        one, other = SCENES[scene](noise, rounds)
        within, beside = median_interval(one), median_interval(other)
        low, high = ratio_interval(median(one), within, median(other), beside)
        covered += low <= 1 <= high
    assert covered >= 0.95 * RUNS
