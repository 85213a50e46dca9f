"""Order, pairing, dropping and budgets, with functions that only record that they were called."""

from __future__ import annotations

import itertools
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch

from replay import timing
from replay.gpu_state import read_gpu_state, throttle_reasons
from replay.resources import peak_bytes
from replay.stopwatch import Contestant, first_call
from replay.timing import measure, run_rounds, warm_up


class FakeStopwatch:
    """Times are what the functions return; samples arrive at `collect`, as on a GPU."""

    def __init__(self) -> None:
        self.order: list[Contestant] = []
        self.pending: list[tuple[Contestant, float]] = []
        self.rounds: list[list[Contestant]] = []
        self.lost = False

    def warm_up_ms(self, function: Callable[[], object]) -> float:
        milliseconds = function()
        assert isinstance(milliseconds, float)
        return milliseconds

    def calibrate(self, contestant: Contestant) -> float:
        return min(contestant.warm_up_ms)

    def sample(self, contestant: Contestant) -> None:
        self.pending.append((contestant, self.warm_up_ms(contestant.function)))

    def collect(self) -> None:
        self.rounds.append([contestant for contestant, _ in self.pending])
        for contestant, milliseconds in self.pending:
            contestant.ms.append(milliseconds)
        self.pending.clear()

    def state(self) -> None:
        return None

    def is_lost(self) -> bool:
        return self.lost


def silent(stage: str, done: int, total: int) -> None:
    pass


def raising_at(call: int) -> Callable[[], float]:
    calls = 0

    def function() -> float:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError(f"call {call}")
        return 10.0

    return function


def constant(milliseconds: float) -> Callable[[], float]:
    return lambda: milliseconds


def test_every_contestant_is_sampled_once_a_round_in_shuffled_order() -> None:
    stopwatch = FakeStopwatch()
    contestants = [Contestant(constant(index + 1.0), rounds=20) for index in range(4)]
    run_rounds(contestants, stopwatch, seed=3, report=silent)
    assert len(stopwatch.rounds) == 20
    assert all(set(order) == set(contestants) for order in stopwatch.rounds)
    assert all(len(order) == 4 for order in stopwatch.rounds)
    assert len(set(map(tuple, stopwatch.rounds))) > 5
    firsts = Counter(contestants.index(order[0]) for order in stopwatch.rounds)
    assert set(firsts) == {0, 1, 2, 3}
    assert [contestant.ms for contestant in contestants] == [[n + 1.0] * 20 for n in range(4)]


def test_the_seed_decides_the_order() -> None:
    def orders(seed: int) -> list[list[int]]:
        stopwatch = FakeStopwatch()
        contestants = [Contestant(constant(1.0), rounds=8) for _ in range(5)]
        run_rounds(contestants, stopwatch, seed, silent)
        return [[contestants.index(each) for each in order] for order in stopwatch.rounds]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_fewer_rounds_are_the_first_ones() -> None:
    stopwatch = FakeStopwatch()
    quick, slow = Contestant(constant(1.0), rounds=10), Contestant(constant(9.0), rounds=3)
    run_rounds([quick, slow], stopwatch, 0, silent)
    assert [slow in order for order in stopwatch.rounds] == [True] * 3 + [False] * 7
    assert (len(quick.ms), len(slow.ms)) == (10, 3)


def test_one_that_raises_is_dropped_and_the_others_go_on() -> None:
    stopwatch = FakeStopwatch()
    sound, failing = Contestant(constant(1.0), rounds=6), Contestant(raising_at(3), rounds=6)
    run_rounds([sound, failing], stopwatch, 0, silent)
    assert len(sound.ms) == 6
    assert failing.ms == [10.0, 10.0]
    assert str(failing.error) == "call 3"


def test_a_dropped_contestant_keeps_no_tensors_alive() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def function() -> object:
        workspace = torch.zeros(10)
        alive.append(weakref.ref(workspace))
        raise RuntimeError("after allocating")

    contestant = Contestant(function)
    warm_up(contestant, FakeStopwatch(), rounds=5, max_seconds=1)
    assert alive[0]() is None
    assert contestant.error is not None
    assert "after allocating" in "".join(traceback.format_exception(contestant.error))
    assert contestant.rounds == 0


def test_interrupts_are_not_swallowed() -> None:
    def function() -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure({"interrupted": function}, "cpu", cache="warm")


def test_warm_up_ends_when_calls_no_longer_get_faster() -> None:
    times = iter([900.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    contestant = Contestant(lambda: next(times))
    warm_up(contestant, FakeStopwatch(), rounds=30, max_seconds=100)
    assert contestant.warm_up_ms == [900.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0]
    assert contestant.rounds == 30


def test_warm_up_goes_on_until_a_clock_had_time_to_rise() -> None:
    contestant = Contestant(constant(0.5))
    warm_up(contestant, FakeStopwatch(), 30, 100)
    assert len(contestant.warm_up_ms) == 1 + timing.MINIMUM_WARM_UP_MS / 0.5


def test_warm_up_is_bounded_in_time_and_calls() -> None:
    slow = Contestant(constant(60_000.0))
    warm_up(slow, FakeStopwatch(), rounds=30, max_seconds=20)
    assert len(slow.warm_up_ms) == 2
    tiny = Contestant(constant(1e-6))
    warm_up(tiny, FakeStopwatch(), 30, 20)
    assert len(tiny.warm_up_ms) == timing.MAXIMUM_WARM_UP_CALLS


@pytest.mark.parametrize(
    ("milliseconds", "asked", "rounds"),
    [(100.0, 30, 30), (1000.0, 30, 20), (60_000.0, 30, 3), (60_000.0, 2, 2)],
)
def test_rounds_shrink_to_what_there_is_time_for(
    milliseconds: float, asked: int, rounds: int
) -> None:
    contestant = Contestant(constant(milliseconds))
    warm_up(contestant, FakeStopwatch(), asked, max_seconds=20)
    assert contestant.rounds == rounds


def test_measure_on_the_cpu() -> None:
    small, large = torch.randn(8, 8), torch.randn(300, 300)
    progress: list[tuple[str, int, int]] = []
    samples = measure(
        {"small": lambda: small @ small, "large": lambda: large @ large, "bad": raising_at(1)},
        "cpu",
        cache="warm",
        rounds=4,
        on_progress=lambda *step: progress.append(step),
    )
    assert list(samples) == ["small", "large", "bad"]
    assert len(samples["small"].ms) == len(samples["large"].ms) == 4
    assert min(samples["small"].ms) > 0
    assert samples["small"].host_ms is None
    assert samples["small"].warm_up_calls > timing.STEADY_CALLS
    assert samples["small"].gpu_before is None
    assert samples["bad"].ms == ()
    assert str(samples["bad"].error) == "call 1"
    assert progress == [("warm-up", n, 3) for n in (1, 2, 3)] + [
        ("round", n, 4) for n in range(1, 5)
    ]


def test_each_sample_follows_calls_of_the_same_function() -> None:
    calls: list[str] = []

    def slow(name: str) -> None:
        time.sleep(0.002)
        calls.append(name)

    functions = {name: partial(slow, name) for name in ("a", "b")}
    measured = measure(functions, "cpu", cache="warm", rounds=5, calls_before=2)
    in_rounds = calls[sum(each.warm_up_calls for each in measured.values()) :]
    runs = [(name, len(list(run))) for name, run in itertools.groupby(in_rounds)]
    assert all(count % 3 == 0 for _, count in runs)
    assert Counter(in_rounds) == {"a": 15, "b": 15}


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match='the cache is always warm: ask for cache="warm"'):
        measure({}, "cpu", cache="cold")
    with pytest.raises(ValueError, match="cannot time on meta"):
        measure({}, "meta")
    with pytest.raises(ValueError, match="0 rounds measure nothing"):
        measure({}, "cpu", cache="warm", rounds=0)


def test_nothing_to_measure() -> None:
    assert measure({}, "cpu", cache="warm") == {}


def test_first_call_returns_the_result() -> None:
    result, milliseconds = first_call(lambda: torch.ones(3), "cpu")
    assert torch.equal(result, torch.ones(3))
    assert milliseconds > 0


def test_memory_and_gpu_state_are_not_measured_on_the_cpu() -> None:
    assert peak_bytes(lambda: torch.ones(3), "cpu") is None
    assert read_gpu_state("cpu") is None


def test_throttle_reasons_have_names() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x4 | 0x40) == ("software power cap", "hardware thermal slowdown")
    assert throttle_reasons(0x1 | 0x1000) == ("idle", "0x1000")


def test_a_device_that_is_lost_ends_the_measurement_at_its_culprit() -> None:
    def breaks() -> float:
        stopwatch.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    stopwatch = FakeStopwatch()
    culprit = Contestant(breaks, "culprit", rounds=2)
    others = [Contestant(lambda: 1.0, name, rounds=2) for name in ("one", "two")]
    named: list[str] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_rounds([*others, culprit], stopwatch, 0, silent, named.append)
    assert named[-1] == "culprit"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        warm_up(culprit, stopwatch, rounds=2, max_seconds=1.0)
