"""The timing of kernels in shuffled rounds, so that samples are paired.

Several processes may share the rounds: each waits for its turn (`replay.workers.shared_rounds`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from replay.rows.row import GpuState
from replay.timing.defaults import MINIMUM_ROUNDS, ROUNDS, SECONDS
from replay.timing.timer import Budget, Cache, Candidate, Function, Timer, timer_for

K = TypeVar("K", bound=Hashable)
"""Key of a candidate."""

MINIMUM_WARM_UP_MS = 20.0
MAXIMUM_WARM_UP_MS = 2000.0
"""Longest warm-up, apart from the first call, which may compile for minutes. The minimum above lets
a GPU's clock rise, however short the calls are."""
MAXIMUM_WARM_UP_CALLS = 1000
STEADY_CALLS = 3
STEADY_GAIN = 0.02


C = TypeVar("C", bound=Hashable, contravariant=True)


class SampleObserver(Protocol[C]):
    """Observer that keeps the inputs and the process as they were while kernels are timed."""

    def before(self, key: C) -> None:
        """Prepare the inputs, right before each timed call."""

    def after(self, key: C) -> None:
        """Clean up after the warm-up and after each sample."""


class Turn(NamedTuple):
    """Permission to run every candidate of this process once."""

    number: int
    """Number of the round, the same in all processes; 0 discards all earlier samples."""
    after_another: bool = False
    """True if another process ran since the last turn, so that an untimed call comes first."""


class Turns(Protocol):
    """Function that yields the turns of this process."""

    def __call__(self, rounds: int, is_done: Callable[[], bool] = ...) -> Iterator[Turn]:
        """Yield at most this number of turns.

        Args:
            is_done: whether this process needs no further turn, asked after each.
        """


def never() -> bool:
    """Return False: every round is needed."""
    return False


def alone(rounds: int, is_done: Callable[[], bool] = never) -> Iterator[Turn]:
    """Yield the turns of a process that shares its rounds with no other process."""
    for number in range(rounds):
        yield Turn(number)
        if is_done():
            return


@dataclass(frozen=True)
class Samples:
    """Samples of one candidate."""

    ms: tuple[float, ...]
    """Milliseconds of rounds 0…n-1; sample i of every candidate comes from the same round."""
    host_ms: float | None
    """Median wall time in which the host enqueues one call; None on a CPU, which has no queue."""
    layer_host_ms: tuple[float, ...]
    """Milliseconds of the host in each round, for one call and the other operations of a model's
    layer (`replay.timing.host_load`); empty on a CPU."""
    warm_up_calls: int
    is_over_time: bool
    """True if even the minimum number of rounds took longer than `max_seconds`."""
    error: BaseException | None
    """Error that the candidate was dropped for, if any; `ms` has the rounds before the error."""
    shares: tuple[float, ...]
    """Share of each sample's time in which no thread waited for a processor; empty on a GPU."""
    interrupted: tuple[int, ...]
    """Rounds whose sample other programs interrupted."""
    gpu_before: GpuState | None
    """GPU state before the first round, the same for all candidates."""
    gpu_during: GpuState | None
    """GPU state during the last round."""

    @property
    def processor_share(self) -> float | None:
        """Median of `shares`; None on a GPU."""
        return statistics.median(self.shares) if self.shares else None

    @property
    def interruption(self) -> str:
        """Sentence for a candidate with too few whole samples; empty otherwise."""
        count, total = len(self.interrupted), len(self.ms)
        if total - count >= min(MINIMUM_ROUNDS, total):
            return ""
        return f"busy machine: {count} of {total} samples were interrupted, too many for a speed-up"


def measure(
    candidates: Mapping[K, Function],
    device: torch.device | str,
    *,
    cache: Cache = "cold",
    rounds: int = ROUNDS,
    calls_before: int = 0,
    seed: int = 0,
    max_seconds: float = SECONDS,
    on_sample: Callable[[K], None] | None = None,
    synchronous: bool = False,
    observer: SampleObserver[K] | None = None,
    turns: Turns = alone,
) -> dict[K, Samples]:
    """Time every candidate on `device`, once in each of `rounds` rounds.

    The order within a round is shuffled. A candidate that raises is dropped, and the others
    continue. CUDA errors that make the GPU unusable are raised.

    Args:
        calls_before: untimed calls of the same candidate before each sample.
        seed: seed of the order within rounds.
        max_seconds: time limit for the samples of a candidate; a slow candidate gets fewer rounds,
            but at least `MINIMUM_ROUNDS` if `rounds` allows.
        on_sample: called with the candidate's key before every warm-up and sample.
        synchronous: end each sample before the next begins, so that after a crash the last key
            names its cause.
        observer: called around each timed call, outside the timed interval.
        turns: yields the rounds, which this process may share with others.

    Raises:
        ValueError: the cache is cold on a CPU, the device is neither CPU nor CUDA, or there are no
            rounds.
    """
    device = torch.device(device)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    timer = timer_for(device, cache, calls_before)
    budget = Budget(max_seconds * len(candidates))
    entered = {key: Candidate(function, budget=budget) for key, function in candidates.items()}
    if observer is not None:
        for key, candidate in entered.items():
            candidate.before = partial(observer.before, key)
            candidate.after = partial(observer.after, key)
    announce = on_sample or (lambda key: None)
    for key, candidate in entered.items():
        announce(key)
        warm_up(candidate, timer, rounds, max_seconds)
    gpu_before = timer.state()
    gpu_during = run_rounds(entered, timer, seed, announce, turns=turns, synchronous=synchronous)
    return {
        key: Samples(
            ms=tuple(candidate.ms),
            host_ms=statistics.median(candidate.host_ms) if candidate.host_ms else None,
            layer_host_ms=tuple(candidate.layer_host_ms),
            warm_up_calls=len(candidate.warm_up_ms),
            is_over_time=candidate.is_over_time,
            error=candidate.error,
            shares=tuple(candidate.shares),
            interrupted=tuple(candidate.interrupted),
            gpu_before=gpu_before,
            gpu_during=gpu_during,
        )
        for key, candidate in entered.items()
    }


def warm_up(candidate: Candidate, timer: Timer, rounds: int, max_seconds: float) -> None:
    """Call a candidate until calls no longer get faster, then set the number of rounds."""
    times = candidate.warm_up_ms
    try:
        while not _is_warm(times):
            times.append(timer.warm_up_ms(candidate.function))
        cost_ms = timer.calibrate(candidate)
    except BaseException as error:
        if timer.is_lost() or isinstance(error, KeyboardInterrupt):
            raise
        candidate.drop(error)
        return
    finally:
        candidate.after()
    affordable = int(max_seconds * 1000 / cost_ms)
    candidate.rounds = min(rounds, max(affordable, MINIMUM_ROUNDS))
    candidate.is_over_time = affordable < candidate.rounds


def run_rounds(
    candidates: Mapping[K, Candidate],
    timer: Timer,
    seed: int,
    announce: Callable[[K], None] = lambda key: None,
    *,
    turns: Turns = alone,
    synchronous: bool = False,
) -> GpuState | None:
    """Sample every candidate once in each of its rounds, in shuffled order.

    Returns:
        The GPU's state during the last round.
    """
    gpu_during = None
    shuffle = random.Random(seed).shuffle
    total = max((candidate.rounds for candidate in candidates.values()), default=0)
    for turn in turns(total):
        order = [
            (key, candidate)
            for key, candidate in candidates.items()
            if candidate.error is None and turn.number < candidate.rounds
        ]
        # In a fixed order, each kernel would always run after the same neighbour.
        shuffle(order)
        for place, (key, candidate) in enumerate(order):
            announce(key)
            if turn.number == 0:
                candidate.forget()
            try:
                if turn.after_another and place == 0:
                    candidate.function()  # fills the caches that the other process has emptied
                timer.sample(candidate)
                if synchronous:
                    timer.collect()
            except BaseException as error:
                if timer.is_lost() or isinstance(error, KeyboardInterrupt):
                    raise
                candidate.drop(error)
                candidate.after()
        if turn.number == total - 1:
            gpu_during = timer.state()
        timer.collect()  # once a round, because it waits for the GPU
    return gpu_during


def _is_warm(times: list[float]) -> bool:
    """Return whether calls have stopped getting faster, or the warm-up has taken long enough."""
    if len(times) >= MAXIMUM_WARM_UP_CALLS or sum(times[1:]) >= MAXIMUM_WARM_UP_MS:
        return True
    if len(times) <= STEADY_CALLS or sum(times[1:]) < MINIMUM_WARM_UP_MS:
        return False
    return min(times[-STEADY_CALLS:]) >= min(times[:-STEADY_CALLS]) * (1 - STEADY_GAIN)
