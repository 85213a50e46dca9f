"""Verdicts on made-up samples, and the work whose times are known."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from replay.selftest import clock, work
from replay.timing.timer import Function

CPU = torch.device("cpu")
NOISE = [1.0 + 0.002 * (-1) ** number for number in range(clock.ROUNDS)]

Samples = Callable[[str, int], Sequence[float]]


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Callable[[Samples], None]:
    """Make `samples(lambda name, block: …)` the measured samples."""

    def given(of: Samples) -> None:
        def samples_of(
            functions: Mapping[str, Function], device: torch.device, seed: int = 0
        ) -> dict[str, tuple[float, ...]]:
            return {name: tuple(of(name, seed)) for name in functions}

        monkeypatch.setattr(clock, "samples_of", samples_of)

    return given


WILD = [1.0 if number % 2 else 2.0 for number in range(clock.ROUNDS)]


@pytest.mark.parametrize(
    ("of", "passed", "told_apart", "resolution"),
    [
        (lambda name, block: NOISE if name == "one" else NOISE[1:] + NOISE[:1], True, 0, 0.005),
        (lambda name, block: [x * (1.02 if name == "one" else 1) for x in NOISE], False, 3, 0.02),
        (lambda name, block: WILD if name == "one" else WILD[::-1], False, 0, 1.0),
    ],
)
def test_one_kernel_under_two_names_must_not_differ(
    samples: Callable[[Samples], None],
    of: Samples,
    passed: bool,
    told_apart: int,
    resolution: float,
) -> None:
    """Agreement does not count if the intervals are too wide to exclude anything."""
    samples(of)
    apart, _, found = clock.same_kernel(CPU)
    assert (apart.passed, apart.figures["told_apart"]) == (passed, told_apart)
    assert resolution / 2 < found <= 1.5 * resolution


def test_different_blocks_are_reported(samples: Callable[[Samples], None]) -> None:
    samples(lambda name, block: [each * (1 + 0.1 * block) for each in NOISE])
    apart, spread, _ = clock.same_kernel(CPU)
    assert apart.passed
    assert spread.passed is False
    assert spread.figures["spread"] == pytest.approx(0.2 / 1.1, rel=0.01)


@pytest.mark.parametrize(("ratio", "passed"), [(2.08, True), (2.2, False), (1.8, False)])
def test_known_ratio_must_be_measured(
    samples: Callable[[Samples], None], ratio: float, passed: bool
) -> None:
    samples(lambda name, block: [each * (ratio if name == "twice" else 1) for each in NOISE])
    found = clock.known_ratio(CPU)
    assert found.passed is passed
    assert found.figures["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(("added", "passed"), [(2.05, True), (2.2, False), (0.0, False)])
def test_known_delay_must_be_measured(
    samples: Callable[[Samples], None], added: float, passed: bool
) -> None:
    samples(lambda name, block: [each + (added if name == "delayed" else 0) for each in NOISE])
    found = clock.known_delay(CPU)
    assert found.passed is passed
    assert found.figures["found_ms"] == pytest.approx(added, abs=1e-9)


@pytest.mark.parametrize(("theirs", "passed"), [(0.985, True), (0.9, False)])
def test_the_profilers_kernels_are_those_of_the_rounds(
    samples: Callable[[Samples], None], monkeypatch: pytest.MonkeyPatch, theirs: float, passed: bool
) -> None:
    """Two launches of one kernel and one of another; warm-up calls are slower and come first."""
    samples(lambda name, block: [1.0] * clock.ROUNDS)
    monkeypatch.setattr(work, "attention", lambda spec, device: lambda: None)
    alone = {"split": [9.0, 9.0], "combine": [9.0]}
    among = {
        "split": [9.0] * 100 + [0.4 * theirs] * 2 * clock.ROUNDS,
        "combine": [9.0] * 50 + [0.2 * theirs] * clock.ROUNDS,
        "flush": [7.0] * clock.ROUNDS,
    }
    profiles = iter([alone, among])
    monkeypatch.setattr(clock, "_kernel_times", lambda run: next(profiles))
    found = clock.profiler(torch.device("cuda"))
    assert found.passed is passed
    assert found.figures["profiler_ms"] == pytest.approx(theirs)
