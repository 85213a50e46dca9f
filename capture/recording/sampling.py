"""Samples calls from a run of unknown length.

A sampler first decides whether it `wants` a call, before anything is computed from the call's
tensors. The wanted calls are then passed to `offer`.

`spread` decides call by call and may drop a kept call for a new one, so that the kept calls are
always spread evenly over the calls seen so far. Four rules in turn choose the dropped call:

- Calls of one phase and shape form a stratum. Strata get equal shares of the sample. If a stratum
  has fewer calls than its share, the other strata share the remainder. Only the largest strata lose
  a call.
- Among the calls of the largest strata, the modules and steps with the most kept calls in all
  strata lose a call first.
- Next, calls off the grid of steps are dropped first. A step s is on the grid if frac(s/φ), with φ
  the golden ratio, is below the share of steps so far that have a kept call. Steps on the grid are
  evenly spaced for any share (the three-gap theorem). A call on the grid is dropped only for a call
  of the same step.
- Ties are broken by frac(l/g + s/g² + k/φ) for layer l, step s and stratum k, with g the plastic
  number. In one stratum, the points of this sequence below a threshold form an even lattice over
  layers and steps (M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018).
  The sequence starts at a different point in each stratum.

To keep N of T calls, `spread` temporarily keeps a small multiple of N calls (about 110 for 10 of
1500) and drops all but N of them.

`hard` keeps the calls of the highest difficulty (`capture.recording.difficulty`), and drops the
easiest call for a harder one. If T calls arrive in random order, it temporarily keeps
N · (1 + ln(T / N)) of them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from capture.text.limits import positive

_PLASTIC = 1.324717957244746
_GOLDEN = 1.618033988749895

SAMPLES = "spread, hard, first, every:N or reservoir (N at least 1)"

PHASES = ("denoise", "prefill", "decode", "encode")
"""Phases of a forward pass whose calls may be stored (`capture.hooks.phases`)."""


class SamplingDecision(NamedTuple):
    """Decision to keep or reject an offered call, with the indices of kept calls to drop for it."""

    keep: bool
    drop: tuple[int, ...] = ()


REJECTED = SamplingDecision(keep=False)


@dataclass(eq=False, slots=True)
class Stratum:
    """Interchangeable calls, which have the same phase and shape."""

    number: int
    layers: dict[str, int] = field(default_factory=dict)
    """Index of each module by first appearance; it is the layer l of the tie-breaking sequence."""
    calls: dict[int, SpreadCall] = field(default_factory=dict)
    """Kept calls, by index."""
    worst: _DropCandidates | None = None
    worst_at: int = -1
    """Value of the sampler's `changes` when `worst` was found."""


@dataclass(eq=False, slots=True)
class SamplePlace:
    """Calls of one module in one stratum."""

    stratum: Stratum
    module: str
    origin: float
    """Start of the tie-breaking sequence."""


class OfferedCall(NamedTuple):
    """A call that a sampler may keep."""

    call_index: int
    place: SamplePlace
    step: int
    nbytes: int
    difficulty: float | None = None
    """Difficulty of the call; None if the sampler does not need it or it cannot be computed."""


class Sampler(Protocol):
    """Interface of a sampler, which selects the calls to keep."""

    is_final: ClassVar[bool]
    """True if the sampler never drops a kept call."""
    by_difficulty: ClassVar[bool]
    """True if the sampler needs the difficulty of each offered call."""
    changes: int
    """Counter that grows whenever the result of `wants` may have changed."""
    kept: int
    nbytes: int
    refused_for_bytes: int
    """Number of calls that exceeded the limit of bytes."""

    def place(self, stratum: Hashable, module: str) -> SamplePlace:
        """Return the place of a module's calls in one stratum."""

    def wants(self, place: SamplePlace, step: int) -> bool:
        """Return whether the sampler wants to be offered the next call.

        If the result is False, it stays the same for this place and step until `changes` grows.
        """

    def offer(self, call: OfferedCall) -> SamplingDecision:
        """Decide whether to keep a wanted call; the caller deletes the dropped calls."""


@dataclass
class _Limited:
    """A sampler of at most `max_calls` calls and `max_bytes` bytes."""

    is_final: ClassVar[bool] = True
    by_difficulty: ClassVar[bool] = False

    max_calls: int
    max_bytes: int | None = None
    changes: int = 0
    kept: int = 0
    nbytes: int = 0
    refused_for_bytes: int = 0
    strata: dict[Hashable, Stratum] = field(default_factory=dict)

    def place(self, stratum: Hashable, module: str) -> SamplePlace:
        found = self.strata.setdefault(stratum, Stratum(len(self.strata)))
        layer = found.layers.setdefault(module, len(found.layers))
        return SamplePlace(found, module, layer / _PLASTIC + found.number / _GOLDEN)

    def fits(self, nbytes: int) -> bool:
        """Return whether a call of this size fits in addition to the kept calls."""
        within_bytes = self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes
        return self.kept < self.max_calls and within_bytes

    def offer(self, call: OfferedCall) -> SamplingDecision:
        """Keep a call if it fits; samplers that compare calls override this."""
        if not self.fits(call.nbytes):
            self.refused_for_bytes += 1
            return REJECTED
        self.kept += 1
        self.nbytes += call.nbytes
        return SamplingDecision(keep=True)


@dataclass
class FirstSampler(_Limited):
    """A sampler of the first calls."""

    def wants(self, place: SamplePlace, step: int) -> bool:
        return self.kept < self.max_calls


@dataclass
class EverySampler(_Limited):
    """A sampler of the first of every `every` calls."""

    every: int = 1
    _seen: int = 0

    def wants(self, place: SamplePlace, step: int) -> bool:
        self._seen += 1
        self.changes += 1  # so that it is asked about every call
        return self.kept < self.max_calls and self._seen % self.every == 1 % self.every


@dataclass
class ReservoirSampler(_Limited):
    """A sampler with equal probabilities: Waterman's algorithm R (Knuth, TAOCP 3.4.2).

    With `max_bytes`, the probability depends on a call's size, because a call is refused if it does
    not fit in place of the call that was drawn.
    """

    is_final: ClassVar[bool] = False

    seed: int = 0
    _seen: int = 0
    _drawn: int = 0
    _calls: list[OfferedCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def wants(self, place: SamplePlace, step: int) -> bool:
        self._seen += 1
        self.changes += 1  # so that it is asked about every call
        self._drawn = int(self._random.random() * self._seen)
        return self.kept < self.max_calls or self._drawn < self.max_calls

    def offer(self, call: OfferedCall) -> SamplingDecision:
        if self.kept < self.max_calls:
            decision = super().offer(call)
            if decision.keep:
                self._calls.append(call)
            return decision
        dropped = self._calls[self._drawn]
        total = self.nbytes - dropped.nbytes + call.nbytes
        if self.max_bytes is not None and total > self.max_bytes:
            self.refused_for_bytes += 1
            return REJECTED
        self._calls[self._drawn], self.nbytes = call, total
        return SamplingDecision(keep=True, drop=(dropped.call_index,))


class HardCall(NamedTuple):
    """A call kept by `HardSampler`. The call that sorts first is dropped first."""

    difficulty: float
    earliness: int
    """Negative call index, so that the earlier of two equally difficult calls is kept."""
    nbytes: int


@dataclass
class HardSampler(_Limited):
    """A sampler of the most difficult calls, and of calls without a difficulty if there is room."""

    is_final: ClassVar[bool] = False
    by_difficulty: ClassVar[bool] = True

    _calls: list[HardCall] = field(default_factory=list)
    """Kept calls, as a heap."""

    def wants(self, place: SamplePlace, step: int) -> bool:
        return True

    def offer(self, call: OfferedCall) -> SamplingDecision:
        difficulty = -math.inf if call.difficulty is None else call.difficulty
        new, dropped = HardCall(difficulty, -call.call_index, call.nbytes), list[HardCall]()
        while not self.fits(call.nbytes):
            if not self._calls or new < self._calls[0]:
                if self.kept + len(dropped) < self.max_calls:
                    self.refused_for_bytes += 1
                for earlier in dropped:
                    self._add(earlier)
                return REJECTED
            easiest = heapq.heappop(self._calls)
            self.kept -= 1
            self.nbytes -= easiest.nbytes
            dropped.append(easiest)
        self._add(new)
        return SamplingDecision(keep=True, drop=tuple(-each.earliness for each in dropped))

    def _add(self, call: HardCall) -> None:
        heapq.heappush(self._calls, call)
        self.kept += 1
        self.nbytes += call.nbytes


class SpreadCall(NamedTuple):
    """A call kept by `SpreadSampler`."""

    call_index: int
    place: SamplePlace
    step: int
    nbytes: int
    priority: float
    """Tie-breaker: the call with the highest priority is dropped."""


class _DropRank(NamedTuple):
    """Order in which calls are dropped: the highest rank is dropped first."""

    crowd: int
    """Number of kept calls of the same module, plus the number of kept calls of the same step."""
    off_grid: bool
    """True if the step is not on the grid of evenly spaced steps."""
    priority: float
    call_index: int


_LOWEST = _DropRank(-1, False, 0.0, -1)


class _DropCandidates:
    """Highest ranks among some kept calls, for comparison with a new call.

    A new call adds one to the crowd of each call of its module, and one to the crowd of each call
    of its step.
    """

    def __init__(self, ranks: Iterable[tuple[SpreadCall, _DropRank]], *, or_new: bool) -> None:
        self.or_new = or_new
        """True if the new call itself may be dropped."""
        self.overall = _LOWEST
        self.of_module: dict[str, _DropRank] = {}
        self.of_step: dict[int, _DropRank] = {}
        self.of_both: dict[tuple[str, int], _DropRank] = {}
        for call, rank in ranks:
            module, step = call.place.module, call.step
            # On the grid, the priority only compares calls of the same step.
            elsewhere = rank if rank.off_grid else rank._replace(priority=-1.0)
            self.overall = max(self.overall, elsewhere)
            elsewhere = elsewhere._replace(crowd=rank.crowd + 1)
            self.of_module[module] = max(self.of_module.get(module, _LOWEST), elsewhere)
            rank = rank._replace(crowd=rank.crowd + 1)
            self.of_step[step] = max(self.of_step.get(step, _LOWEST), rank)
            rank = rank._replace(crowd=rank.crowd + 1)
            both = module, step
            self.of_both[both] = max(self.of_both.get(both, _LOWEST), rank)

    def beside(self, module: str, step: int) -> _DropRank:
        """Return the highest rank after adding a call of `module` in `step`."""
        rank = self.overall
        of_module, of_step = self.of_module.get(module), self.of_step.get(step)
        if of_module is not None and of_module > rank:
            rank = of_module
        if of_step is not None and of_step > rank:
            rank = of_step
        if of_module is not None and of_step is not None:
            rank = max(rank, self.of_both.get((module, step), _LOWEST))
        return rank


@dataclass
class SpreadSampler(_Limited):
    """A sampler of calls spread over all strata, modules and steps."""

    is_final: ClassVar[bool] = False

    _calls: dict[int, SpreadCall] = field(default_factory=dict)
    _modules: Counter[str] = field(default_factory=Counter)
    _steps: Counter[int] = field(default_factory=Counter)
    """Number of kept calls of each step that has any; `_modules` is the same for modules."""
    _last_step: int = 0
    _grid: float = 1.0
    """Share of the steps so far that have a kept call."""

    def wants(self, place: SamplePlace, step: int) -> bool:
        if step > self._last_step:
            self._last_step = step
            self._changed()
        return self.kept < self.max_calls or self._victim(place, step) is not None

    def offer(self, call: OfferedCall) -> SamplingDecision:
        dropped: list[SpreadCall] = []
        while not self.fits(call.nbytes):
            victim = self._victim(call.place, call.step)
            if victim is None:
                if self.kept + len(dropped) < self.max_calls:
                    self.refused_for_bytes += 1
                for earlier in dropped:
                    self._add(earlier)
                return REJECTED
            dropped.append(self._calls[victim])
            self._remove(self._calls[victim])
        priority = _priority(call.place, call.step)
        self._add(SpreadCall(call.call_index, call.place, call.step, call.nbytes, priority))
        return SamplingDecision(keep=True, drop=tuple(earlier.call_index for earlier in dropped))

    def _victim(self, place: SamplePlace, step: int) -> int | None:
        """Return the index of the call to drop for a new call; None to drop the new call itself."""
        stratum = place.stratum
        worst = stratum.worst
        if worst is None or stratum.worst_at != self.changes:
            worst = stratum.worst = self._worst(stratum)
            stratum.worst_at = self.changes
        beside = self._modules.get(place.module, 0) + self._steps.get(step, 0)
        rank = worst.beside(place.module, step) if beside else worst.overall
        if not worst.or_new:
            return rank.call_index
        crowd = beside + 2
        if crowd != rank.crowd:  # this comparison alone decides most calls
            return None if crowd > rank.crowd else rank.call_index
        own = (crowd, self._off_grid(step), _priority(place, step), math.inf)
        return None if own > rank else rank.call_index

    def _worst(self, stratum: Stratum) -> _DropCandidates:
        """Return the highest ranks in the largest strata after adding a call to `stratum`."""
        size = len(stratum.calls) + 1
        kept = {call.place.stratum for call in self._calls.values()}  # some strata have no calls
        largest = max([size, *(len(other.calls) for other in kept)])
        calls = [
            call
            for other in kept
            if len(other.calls) == largest or (other is stratum and size == largest)
            for call in other.calls.values()
        ]
        return _DropCandidates(((call, self._rank(call)) for call in calls), or_new=size == largest)

    def _rank(self, call: SpreadCall) -> _DropRank:
        crowd = self._modules[call.place.module] + self._steps[call.step]
        return _DropRank(crowd, self._off_grid(call.step), call.priority, call.call_index)

    def _off_grid(self, step: int) -> bool:
        return step / _GOLDEN % 1.0 >= self._grid

    def _add(self, call: SpreadCall) -> None:
        self._modules[call.place.module] += 1
        self._steps[call.step] += 1
        self.kept += 1
        self.nbytes += call.nbytes
        self._calls[call.call_index] = call.place.stratum.calls[call.call_index] = call
        self._changed()

    def _remove(self, call: SpreadCall) -> None:
        self._modules -= Counter([call.place.module])  # `-=` removes modules without kept calls
        self._steps -= Counter([call.step])
        self.kept -= 1
        self.nbytes -= call.nbytes
        del self._calls[call.call_index], call.place.stratum.calls[call.call_index]
        self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._grid = len(self._steps) / (self._last_step + 1)


def _priority(place: SamplePlace, step: int) -> float:
    return (place.origin + step / _PLASTIC**2) % 1.0


def check_sample(sample: str) -> None:
    """Raise ValueError unless `sample` names a sampler."""
    if sample not in ("spread", "hard", "first", "reservoir"):
        interval_of(sample)


def make_sampler(sample: str, max_calls: int, max_bytes: int | None, seed: int) -> Sampler:
    """Create the sampler with the name `sample`, one of `SAMPLES`."""
    max_calls = positive("max", max_calls)
    if max_bytes is not None:
        max_bytes = positive("max_bytes", max_bytes)
    if sample == "spread":
        return SpreadSampler(max_calls, max_bytes)
    if sample == "hard":
        return HardSampler(max_calls, max_bytes)
    if sample == "first":
        return FirstSampler(max_calls, max_bytes)
    if sample == "reservoir":
        return ReservoirSampler(max_calls, max_bytes, seed=seed)
    return EverySampler(max_calls, max_bytes, every=interval_of(sample))


def interval_of(sample: str) -> int:
    """Return the N of `every:N`."""
    name, _, number = sample.partition(":")
    if name != "every" or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"sample must be {SAMPLES}, not {sample!r}")
    return int(number)
