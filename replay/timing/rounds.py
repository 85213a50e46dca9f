"""How long kernels take, compared fairly: interleaved in shuffled rounds, so samples are paired."""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from replay.rows.row import GpuState
from replay.timing.defaults import MINIMUM_ROUNDS, ROUNDS, SECONDS
from replay.timing.statistics import median_interval
from replay.timing.timer import Cache, Candidate, Function, Timer, timer_for

K = TypeVar("K", bound=Hashable)
"""What candidates are known by."""

MORE_ROUNDS = 1.5
"""From one look at the noise to the next."""
MINIMUM_WARM_UP_MS = 20.0
MAXIMUM_WARM_UP_MS = 2000.0
"""Neither counts the first call, which may compile for minutes. A GPU's clock needs some time of
work to rise, however short the calls."""
MAXIMUM_WARM_UP_CALLS = 1000
STEADY_CALLS = 3
STEADY_GAIN = 0.02


C = TypeVar("C", bound=Hashable, contravariant=True)


class SampleObserver(Protocol[C]):
    """Who prepares the inputs of each timed call and looks at what it returned."""

    def before(self, key: C) -> None:
        """Called right before each timed call."""

    def fingerprint(self, key: C, result: object) -> None:
        """Given what each timed call on a GPU returned, as soon as the call is enqueued."""

    def keep(self, key: C, result: object) -> None:
        """Given what some timed calls of each sample returned, of which the last counts."""

    def after(self, key: C) -> None:
        """Called after the warm-up and after each sample."""


@dataclass(frozen=True)
class Samples:
    """What `measure` found for one candidate."""

    ms: tuple[float, ...]
    """Milliseconds of rounds 0…n-1: sample i of every candidate is from the same round."""
    host_ms: float | None
    """Median wall time the host needs to enqueue one call; None on CPU, where it is the call."""
    layer_host_ms: tuple[float, ...]
    """By round, the same of one call and what comes after it in a model's layer
    (`replay.timing.host_load`); empty on CPU."""
    warm_up_calls: int
    is_over_time: bool
    """Whether its few rounds took longer than `max_seconds`."""
    error: BaseException | None
    """What dropped the candidate, if anything did; `ms` then holds the rounds before it."""
    gpu_before: GpuState | None
    """Before the first round, the same for all candidates."""
    gpu_during: GpuState | None
    """While the samples of the last round ran."""


def measure(
    candidates: Mapping[K, Function],
    device: torch.device | str,
    *,
    cache: Cache = "cold",
    rounds: int = ROUNDS,
    calls_before: int = 0,
    seed: int = 0,
    max_seconds: float = SECONDS,
    max_noise: float | None = None,
    on_sample: Callable[[K], None] | None = None,
    synchronous: bool = False,
    observer: SampleObserver[K] | None = None,
) -> dict[K, Samples]:
    """Time every candidate on `device`, once in each of `rounds` rounds.

    The order within a round is shuffled from `seed`. A candidate whose warm-up says that its
    samples would take more than `max_seconds` gets fewer rounds, the first ones, but at least
    `MINIMUM_ROUNDS` if so many are asked for. With `max_noise` the rounds end sooner once every
    candidate's median time is known that well (`Enough`). One that raises is dropped with its
    exception, and the others go on. A CUDA error that makes the whole process unusable is raised;
    `on_sample` is told who is next before every warm-up and sample, and with `synchronous` each
    sample ends before the next begins, so that the last one named is the one that did it. So many
    untimed `calls_before` each sample are of the same candidate. A `observer` is called, untimed,
    right before each timed call, and is given what one of each sample returned. A candidate that
    changes times that were taken is dropped, and they are put back.

    Raises:
        ValueError: `cache="cold"` on the CPU, a device that is neither CPU nor CUDA, no rounds.
    """
    device = torch.device(device)
    if rounds < 1:
        raise ValueError(f"{rounds} rounds measure nothing: ask for at least one")
    timer = timer_for(device, cache, calls_before)
    entered = {key: Candidate(function) for key, function in candidates.items()}
    if observer is not None:
        for key, candidate in entered.items():
            candidate.before = partial(observer.before, key)
            candidate.fingerprint = partial(observer.fingerprint, key)
            candidate.keep = partial(observer.keep, key)
            candidate.after = partial(observer.after, key)
    announce = on_sample or (lambda key: None)
    for key, candidate in entered.items():
        announce(key)
        warm_up(candidate, timer, rounds, max_seconds)
    gpu_before = timer.state()
    enough = None if max_noise is None else Enough(max_noise)
    gpu_during = run_rounds(entered, timer, seed, announce, enough=enough, synchronous=synchronous)
    return {
        key: Samples(
            ms=tuple(candidate.ms),
            host_ms=statistics.median(candidate.host_ms) if candidate.host_ms else None,
            layer_host_ms=tuple(candidate.layer_host_ms),
            warm_up_calls=len(candidate.warm_up_ms),
            is_over_time=candidate.is_over_time,
            error=candidate.error,
            gpu_before=gpu_before,
            gpu_during=gpu_during,
        )
        for key, candidate in entered.items()
    }


def warm_up(candidate: Candidate, timer: Timer, rounds: int, max_seconds: float) -> None:
    """Call until calls no longer get faster, then settle how many rounds there is time for."""
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


class Enough:
    """Decides after some of the rounds whether the noise is low enough to do without the others.

    The noise of a candidate is half the width of the interval of its median time, relative to it.
    An interval that is narrow by chance ends the rounds just when it is likely to be wrong, so it
    is looked at seldom, each time after half as many rounds again, and has to be narrow twice in a
    row. Simulated, speed-ups then keep their 95 % (`tests/replay/timing/test_coverage.py`).
    """

    def __init__(self, max_noise: float) -> None:
        self.max_noise = max_noise
        self.next_look = MINIMUM_ROUNDS
        self.was_narrow = False

    def after(self, rounds: int, times: Iterable[Sequence[float]]) -> bool:
        """Whether no more are needed, by the times so far of those that would go on."""
        if rounds < self.next_look:
            return False
        self.next_look = math.ceil(rounds * MORE_ROUNDS)
        intervals = [median_interval(each) for each in times]
        is_narrow = all(each is not None and each.noise <= self.max_noise for each in intervals)
        is_enough, self.was_narrow = is_narrow and self.was_narrow, is_narrow
        return is_enough


class TakenTimes:
    """The times of candidates as they were taken.

    Kernels run in the process that keeps them, and could change their own and those of others.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._taken = {each: [array("d").tobytes() for _ in each.times()] for each in candidates}

    def note(self) -> None:
        """Those that are there now are right."""
        for candidate, taken in self._taken.items():
            taken[:] = (array("d", times).tobytes() for times in candidate.times())

    def restore(self, sampled: Candidate) -> bool:
        """Put back what differs, but for one new time of whom was sampled; whether anything did."""
        differed = False
        for candidate, taken in self._taken.items():
            for times, before in zip(candidate.times(), taken, strict=True):
                old = array("d", before)
                new = times[len(old) :][: int(candidate is sampled)]
                if array("d", times).tobytes() != before + array("d", new).tobytes():
                    times[:] = old
                    differed = True
        return differed


def run_rounds(
    candidates: Mapping[K, Candidate],
    timer: Timer,
    seed: int,
    announce: Callable[[K], None] = lambda key: None,
    *,
    enough: Enough | None = None,
    synchronous: bool = False,
) -> GpuState | None:
    """Sample every candidate once a round, in shuffled order, until its rounds are used up.

    Returns the GPU's state while the last round was under way; where `enough` ended the rounds
    sooner, too.
    """
    gpu_during = None
    shuffle, taken = random.Random(seed).shuffle, TakenTimes(candidates.values())
    total = max((candidate.rounds for candidate in candidates.values()), default=0)
    for done in range(total):
        order = [
            (key, each)
            for key, each in candidates.items()
            if each.error is None and done < each.rounds
        ]
        shuffle(order)
        for key, candidate in order:
            announce(key)
            try:
                timer.sample(candidate)
                if synchronous:
                    timer.collect()
                if taken.restore(candidate):
                    raise RuntimeError("changes times that were taken before")
            except BaseException as error:
                if timer.is_lost() or isinstance(error, KeyboardInterrupt):
                    raise
                candidate.drop(error)
                candidate.after()
            taken.note()
        is_look = enough is not None and done + 1 >= enough.next_look
        if is_look or done == total - 1:
            gpu_during = timer.state()
        timer.collect()
        taken.note()
        if enough is not None and enough.after(
            done + 1, [each.ms for _, each in order if each.error is None]
        ):
            break
    return gpu_during


def _is_warm(times: list[float]) -> bool:
    """Whether the last calls brought nothing faster than those before, or warm-up took enough."""
    if len(times) >= MAXIMUM_WARM_UP_CALLS or sum(times[1:]) >= MAXIMUM_WARM_UP_MS:
        return True
    if len(times) <= STEADY_CALLS or sum(times[1:]) < MINIMUM_WARM_UP_MS:
        return False
    return min(times[-STEADY_CALLS:]) >= min(times[:-STEADY_CALLS]) * (1 - STEADY_GAIN)
