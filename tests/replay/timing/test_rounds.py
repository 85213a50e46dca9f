"""Order, pairing, dropping and budgets of rounds, with functions that only note their calls."""

import itertools
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from replay.timing import rounds
from replay.timing.rounds import Turn, measure, run_rounds, warm_up
from replay.timing.timer import Candidate


class FakeTimer:
    """Timer whose times are the functions' results; samples arrive at `collect`, as on a GPU."""

    def __init__(self) -> None:
        self.order: list[Candidate] = []
        self.pending: list[tuple[Candidate, float]] = []
        self.rounds: list[list[Candidate]] = []
        self.lost = False

    def warm_up_ms(self, function: Callable[[], object]) -> float:
        milliseconds = function()
        assert isinstance(milliseconds, float)
        return milliseconds

    def calibrate(self, candidate: Candidate) -> float:
        return min(candidate.warm_up_ms)

    def sample(self, candidate: Candidate) -> None:
        self.pending.append((candidate, self.warm_up_ms(candidate.function)))

    def collect(self) -> None:
        self.rounds.append([candidate for candidate, _ in self.pending])
        for candidate, milliseconds in self.pending:
            candidate.ms.append(milliseconds)
        self.pending.clear()

    def state(self) -> None:
        return None

    def is_lost(self) -> bool:
        return self.lost


def raising_at(call: int, error: BaseException | None = None) -> Callable[[], float]:
    calls = 0

    def function() -> float:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error or RuntimeError(f"call {call}")
        return 10.0

    return function


def raising(error: BaseException) -> Callable[[], float]:
    def function() -> float:
        raise error

    return function


def constant(milliseconds: float) -> Callable[[], float]:
    return lambda: milliseconds


def test_every_candidate_is_sampled_once_a_round_in_shuffled_order() -> None:
    timer = FakeTimer()
    candidates = [Candidate(constant(index + 1.0), rounds=20) for index in range(4)]
    run_rounds(dict(enumerate(candidates)), timer, seed=3)
    assert len(timer.rounds) == 20
    assert all(set(order) == set(candidates) for order in timer.rounds)
    assert all(len(order) == 4 for order in timer.rounds)
    assert len(set(map(tuple, timer.rounds))) > 5
    firsts = Counter(candidates.index(order[0]) for order in timer.rounds)
    assert set(firsts) == {0, 1, 2, 3}
    assert [candidate.ms for candidate in candidates] == [[n + 1.0] * 20 for n in range(4)]


def test_seed_decides_the_order() -> None:
    def orders(seed: int) -> list[list[int]]:
        timer = FakeTimer()
        candidates = [Candidate(constant(1.0), rounds=8) for _ in range(5)]
        run_rounds(dict(enumerate(candidates)), timer, seed)
        return [[candidates.index(each) for each in order] for order in timer.rounds]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_fewer_rounds_are_the_first_ones() -> None:
    timer = FakeTimer()
    quick, slow = Candidate(constant(1.0), rounds=10), Candidate(constant(9.0), rounds=3)
    run_rounds({"quick": quick, "slow": slow}, timer, 0)
    assert [slow in order for order in timer.rounds] == [True] * 3 + [False] * 7
    assert (len(quick.ms), len(slow.ms)) == (10, 3)


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(0)])
def test_candidate_that_raises_is_dropped(error: BaseException) -> None:
    timer = FakeTimer()
    sound, failing = Candidate(constant(1.0), rounds=6), Candidate(raising_at(3, error), rounds=6)
    run_rounds({"sound": sound, "failing": failing}, timer, 0)
    assert (len(sound.ms), failing.ms, failing.error) == (6, [10.0, 10.0], error)
    never_warm = Candidate(raising(error))
    warm_up(never_warm, timer, 3, 1.0)
    assert never_warm.error is error


def test_interrupt_in_warm_up_is_raised() -> None:
    interrupted = Candidate(raising(KeyboardInterrupt()), rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run_rounds({"interrupted": interrupted}, FakeTimer(), 0)
    with pytest.raises(KeyboardInterrupt):
        warm_up(Candidate(raising(KeyboardInterrupt())), FakeTimer(), 3, 1.0)


def test_dropped_candidate_keeps_no_tensors_alive() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def function() -> object:
        workspace = torch.zeros(10)
        alive.append(weakref.ref(workspace))
        raise RuntimeError("after allocating")

    candidate = Candidate(function)
    warm_up(candidate, FakeTimer(), rounds=5, max_seconds=1)
    assert alive[0]() is None
    assert "after allocating" in "".join(traceback.format_exception(candidate.error))
    assert candidate.rounds == 0


def test_warm_up_ends_when_calls_no_longer_get_faster() -> None:
    times = iter([900.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    candidate = Candidate(lambda: next(times))
    warm_up(candidate, FakeTimer(), rounds=30, max_seconds=100)
    assert candidate.warm_up_ms == [900.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0]
    assert candidate.rounds == 30


def test_warm_up_goes_on_until_a_clock_had_time_to_rise() -> None:
    candidate = Candidate(constant(0.5))
    warm_up(candidate, FakeTimer(), 30, 100)
    assert len(candidate.warm_up_ms) == 1 + rounds.MINIMUM_WARM_UP_MS / 0.5


def test_warm_up_is_bounded_in_time_and_calls() -> None:
    slow = Candidate(constant(60_000.0))
    warm_up(slow, FakeTimer(), rounds=30, max_seconds=20)
    assert len(slow.warm_up_ms) == 2
    tiny = Candidate(constant(1e-6))
    warm_up(tiny, FakeTimer(), 30, 20)
    assert len(tiny.warm_up_ms) == rounds.MAXIMUM_WARM_UP_CALLS


@pytest.mark.parametrize(
    ("milliseconds", "asked", "rounds"),
    [(100.0, 30, 30), (1000.0, 30, 20), (60_000.0, 30, 6), (60_000.0, 2, 2)],
)
def test_rounds_shrink_to_the_time_limit(milliseconds: float, asked: int, rounds: int) -> None:
    candidate = Candidate(constant(milliseconds))
    warm_up(candidate, FakeTimer(), asked, max_seconds=20)
    assert candidate.rounds == rounds
    assert candidate.is_over_time == (milliseconds * rounds > 20_000)


def test_turns_decide_which_rounds_run_and_a_first_turn_discards_earlier_samples() -> None:
    times = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def turns(total: int) -> Iterator[Turn]:
        assert total == 6
        return iter([Turn(0), Turn(1), Turn(0), Turn(1, after_another=True)])

    candidate = Candidate(lambda: next(times), rounds=6)
    run_rounds({"mine": candidate}, FakeTimer(), 0, turns=turns)
    assert candidate.ms == [3.0, 5.0]  # an untimed call begins the turn after another process


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


def test_invalid_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match='the cache is always warm: ask for cache="warm"'):
        measure({}, "cpu", cache="cold")
    with pytest.raises(ValueError, match="cannot time on meta"):
        measure({}, "meta")
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        measure({}, "cpu", cache="warm", rounds=0)


def test_device_that_is_lost_ends_the_measurement_at_its_culprit() -> None:
    def breaks() -> float:
        timer.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    timer = FakeTimer()
    culprit = Candidate(breaks, rounds=2)
    others = {name: Candidate(lambda: 1.0, rounds=2) for name in ("one", "two")}
    named: list[str] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_rounds({**others, "culprit": culprit}, timer, 0, named.append)
    assert named[-1] == "culprit"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        warm_up(culprit, timer, rounds=2, max_seconds=1.0)


def test_observer_cleans_up_after_a_failing_candidate() -> None:
    seen: list[str] = []
    fails = Candidate(raising_at(2), after=lambda: seen.append("after"), rounds=8)
    run_rounds({"fails": fails}, FakeTimer(), 0)
    assert fails.error is not None
    assert seen == ["after"]
