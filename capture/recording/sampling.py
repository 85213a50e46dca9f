"""Samples calls from a run of unknown length.

A sampler first decides whether it `wants` a call, before anything is computed from the call's
tensors. The wanted calls are then passed to `offer`.

`hard` keeps the calls of the highest difficulty (`capture.recording.difficulty`), and drops the
easiest call for a harder one.

`spread` decides call by call and may drop a kept call for a new one, so that the kept calls are
always spread evenly over the calls seen so far. Four rules in turn choose the dropped call:

- Calls of one phase and shape form a stratum. Strata get equal shares of the sample. If a stratum
  has fewer calls than its share, the other strata share the remainder. Only the largest strata lose
  a call.
- The dropped call is in one of the largest strata. Within these, it is from the module and step
  with the most kept calls over all strata.
- Next, calls off the grid of steps are dropped first. A step s is on the grid if frac(s/φ), with φ
  the golden ratio, is below the share of steps so far that have a kept call. Steps on the grid are
  evenly spaced for any share (the three-gap theorem). A call on the grid is dropped only for a call
  of the same step.
- Ties are broken by frac(l/g + s/g² + k/φ) for layer l, step s and stratum k, with g the plastic
  number. In one stratum, the points of this sequence below a threshold form an even lattice over
  layers and steps (M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018).
  The sequence starts at a different point in each stratum.

To keep N of T calls, `spread` temporarily keeps a small multiple of N calls (about 110 for 10 of
1500), and `hard` about N · (1 + ln(T / N)).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from capture.text.limits import positive

_PLASTIC = 1.324717957244746
_GOLDEN = 1.618033988749895

SAMPLES = "spread, hard, first or every:N (N at least 1)"

PHASES = ("denoise", "prefill", "decode", "encode")
"""Phases of a forward pass whose calls may be stored (`capture.hooks.phases`)."""


@dataclass(eq=False, slots=True)
class Stratum:
    """Interchangeable calls, which have the same phase and shape."""

    number: int
    layers: dict[str, int] = field(default_factory=dict)
    """Index of each module by first appearance; it is the layer l of the tie-breaking sequence."""
    candidates: DropCandidates | None = None
    candidates_at: int = -1
    """Value of the sampler's `changes` when `candidates` was found."""


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


@dataclass
class Sampler:
    """A sampler of at most `max_calls` calls and `max_bytes` bytes: the first calls that fit.

    The subclasses differ in the calls that they want, and in the calls that they drop for others.
    """

    is_final: ClassVar[bool] = True
    """True if the sampler never drops a kept call."""
    by_difficulty: ClassVar[bool] = False
    """True if the sampler needs the difficulty of each offered call."""

    max_calls: int
    max_bytes: int | None = None
    changes: int = 0
    """Counter that grows whenever the result of `wants` may have changed."""
    nbytes: int = 0
    refused_for_bytes: int = 0
    """Number of calls that exceeded the limit of bytes."""
    strata: dict[Hashable, Stratum] = field(default_factory=dict)
    calls: dict[int, OfferedCall] = field(default_factory=dict)
    """Kept calls, by index."""

    @property
    def kept(self) -> int:
        return len(self.calls)

    def place(self, stratum: Hashable, module: str) -> SamplePlace:
        """Return the place of a module's calls in one stratum."""
        found = self.strata.setdefault(stratum, Stratum(len(self.strata)))
        layer = found.layers.setdefault(module, len(found.layers))
        return SamplePlace(found, module, layer / _PLASTIC + found.number / _GOLDEN)

    def wants(self, place: SamplePlace, step: int) -> bool:
        """Return whether the sampler wants to be offered the next call.

        If the result is False, it stays the same for this place and step until `changes` grows.
        """
        return self.kept < self.max_calls

    def offer(self, call: OfferedCall) -> list[int] | None:
        """Return the indices of kept calls to drop for a wanted call; None if it is rejected."""
        dropped: list[OfferedCall] = []
        while self.kept >= self.max_calls or not self._fits(call):
            victim = self._victim(call)
            if victim is None:
                if self.kept + len(dropped) < self.max_calls:
                    self.refused_for_bytes += 1
                for earlier in dropped:
                    self._add(earlier)
                return None
            self._remove(victim)
            dropped.append(victim)
        self._add(call)
        return [earlier.call_index for earlier in dropped]

    def _fits(self, call: OfferedCall) -> bool:
        return self.max_bytes is None or self.nbytes + call.nbytes <= self.max_bytes

    def _victim(self, call: OfferedCall) -> OfferedCall | None:
        """Return the kept call to drop for a new call; None to reject the new call."""
        return None

    def _add(self, call: OfferedCall) -> None:
        self.calls[call.call_index] = call
        self.nbytes += call.nbytes

    def _remove(self, call: OfferedCall) -> None:
        del self.calls[call.call_index]
        self.nbytes -= call.nbytes


@dataclass
class EverySampler(Sampler):
    """A sampler of the first of every `every` calls."""

    every: int = 1
    _seen: int = 0

    def wants(self, place: SamplePlace, step: int) -> bool:
        self._seen += 1
        self.changes += 1  # so that `wants` is called for every call
        return self.kept < self.max_calls and self._seen % self.every == 1 % self.every


@dataclass
class HardSampler(Sampler):
    """A sampler of the most difficult calls, and of calls without a difficulty if there is room."""

    is_final: ClassVar[bool] = False
    by_difficulty: ClassVar[bool] = True

    def wants(self, place: SamplePlace, step: int) -> bool:
        return True

    def _victim(self, call: OfferedCall) -> OfferedCall | None:
        easiest = min([*self.calls.values(), call], key=_hardness)
        return None if easiest is call else easiest


def _hardness(call: OfferedCall) -> tuple[float, int]:
    """Return a sort key; of two equally difficult calls, the earlier one is harder."""
    return -math.inf if call.difficulty is None else call.difficulty, -call.call_index


class _DropRank(NamedTuple):
    """Order in which calls are dropped: the highest rank is dropped first."""

    crowd: int
    """Number of kept calls of the same module, plus the number of kept calls of the same step."""
    off_grid: bool
    """True if the step is not on the grid of evenly spaced steps."""
    priority: float
    call_index: float


class DropCandidates(NamedTuple):
    """Kept calls of the strata that are largest with a new call, ranked without that call."""

    calls: list[tuple[OfferedCall, _DropRank]]
    or_new: bool
    """True if the new call itself may be dropped."""


@dataclass
class SpreadSampler(Sampler):
    """A sampler of calls spread over all strata, modules and steps."""

    is_final: ClassVar[bool] = False

    _modules: Counter[str] = field(default_factory=Counter)
    _steps: Counter[int] = field(default_factory=Counter)
    """Number of kept calls by step, without zeros; `_modules` counts by module."""
    _last_step: int = 0
    _grid: float = 1.0
    """Share of the steps so far that have a kept call."""

    def wants(self, place: SamplePlace, step: int) -> bool:
        if step > self._last_step:
            self._last_step = step
            self._changed()
        if self.kept < self.max_calls:
            return True
        return self._victim(OfferedCall(-1, place, step, nbytes=0)) is not None

    def _victim(self, call: OfferedCall) -> OfferedCall | None:
        stratum, module, step = call.place.stratum, call.place.module, call.step
        found = stratum.candidates
        if found is None or stratum.candidates_at != self.changes:
            found = stratum.candidates = self._candidates(stratum)
            stratum.candidates_at = self.changes
        crowd = self._modules.get(module, 0) + self._steps.get(step, 0) + 2
        own = _DropRank(crowd, self._off_grid(step), _priority(call.place, step), math.inf)
        worst = own if found.or_new else _LOWEST
        for kept, (crowd, off_grid, priority, index) in found.calls:
            # The new call adds one to the crowd of each call of its module or of its step.
            crowd += (kept.place.module == module) + (kept.step == step)
            if crowd >= worst.crowd:  # this comparison alone decides most calls
                if not off_grid and kept.step != step:
                    priority = -1.0  # on the grid, only compared with calls of the same step
                worst = max(worst, _DropRank(crowd, off_grid, priority, index))
        return None if worst is own else self.calls[int(worst.call_index)]

    def _candidates(self, stratum: Stratum) -> DropCandidates:
        """Return the calls that may be dropped after adding a call to `stratum`."""
        sizes = Counter(call.place.stratum for call in self.calls.values())
        sizes[stratum] += 1
        largest = max(sizes.values())
        return DropCandidates(
            [
                (call, self._rank(call))
                for call in self.calls.values()
                if sizes[call.place.stratum] == largest
            ],
            or_new=sizes[stratum] == largest,
        )

    def _rank(self, call: OfferedCall) -> _DropRank:
        crowd = self._modules[call.place.module] + self._steps[call.step]
        priority = _priority(call.place, call.step)
        return _DropRank(crowd, self._off_grid(call.step), priority, call.call_index)

    def _off_grid(self, step: int) -> bool:
        return step / _GOLDEN % 1.0 >= self._grid

    def _add(self, call: OfferedCall) -> None:
        super()._add(call)
        self._modules[call.place.module] += 1
        self._steps[call.step] += 1
        self._changed()

    def _remove(self, call: OfferedCall) -> None:
        super()._remove(call)
        self._modules -= Counter([call.place.module])  # `-=` removes modules without kept calls
        self._steps -= Counter([call.step])
        self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._grid = len(self._steps) / (self._last_step + 1)


_LOWEST = _DropRank(-1, False, 0.0, -1)


def _priority(place: SamplePlace, step: int) -> float:
    """Return the tie-breaker of a call: the call with the highest priority is dropped."""
    return (place.origin + step / _PLASTIC**2) % 1.0


def make_sampler(sample: str, max_calls: int, max_bytes: int | None) -> Sampler:
    """Create the sampler with the name `sample`, one of `SAMPLES`.

    Raises:
        ValueError: the name or a limit is invalid.
    """
    max_calls = positive("max", max_calls)
    if max_bytes is not None:
        max_bytes = positive("max_bytes", max_bytes)
    samplers = {"spread": SpreadSampler, "hard": HardSampler, "first": Sampler}
    if sample in samplers:
        return samplers[sample](max_calls, max_bytes)
    name, _, every = sample.partition(":")
    if name != "every" or not every.isdecimal() or int(every) < 1:
        raise ValueError(f"sample must be {SAMPLES}, not {sample!r}")
    return EverySampler(max_calls, max_bytes, every=int(every))
