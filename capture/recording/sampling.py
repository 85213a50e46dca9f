"""Samples calls from a run of unknown length.

A sampler first decides whether it `wants` a call, before anything is computed from the call's
tensors. The wanted calls are then passed to `offer`.

With `max="per-layer"`, one call of each module and phase is kept, at a step that a hash of the
module and step chooses, so that the steps differ between modules. With named denoising steps, one
call of each module is kept at each of them.

`hard` keeps the calls of the highest difficulty (`capture.recording.difficulty`), and drops the
easiest call for a harder one. Calls with NaN or infinity are the hardest, the earliest first.

Every sampler keeps the first call that is offered with NaN or infinity.

`spread` decides call by call and may drop a kept call for a new one, so that the kept calls are
always spread evenly over the calls seen so far:

- Calls of one phase and shape form a stratum. Strata get equal shares of the sample. If a stratum
  has fewer calls than its share, the other strata share the remainder. Only the largest strata lose
  a call.
- Of these, the dropped call is in the step with the most kept calls. If no step has two, it is the
  call whose removal leaves the smallest gap between kept steps.
- A call replaces one of its stratum only if its layer is needed at least as much: fewer kept calls
  are in the layer, or the gap between kept layers around it is at least as large.

The batches of an inference engine are spread over their figures instead: of a stratum that loses a
call, one of the two nearest batches is dropped (`capture.recording.batch_choice`).

With N calls on an axis of T positions, the smallest gap that a removal leaves is at most twice the
even gap, (T + 1) / (N + 1), so no gap between kept steps or layers, ends included, exceeds this.

To keep N of T calls, `spread` and `hard` temporarily keep about N · (1 + ln(T / N)) calls.
"""

from __future__ import annotations

import bisect
import math
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from capture.call.batch import BatchSize
from capture.recording.batch_choice import Candidate, redundant
from capture.text.limits import natural, positive

PER_LAYER = "per-layer"
SAMPLES = "spread, hard, first or every:N (N at least 1)"

DENOISE = "denoise"
PHASES = (DENOISE, "prefill", "extend", "decode", "mixed", "encode")
"""Phases of a forward pass whose calls may be stored (`capture.hooks.phases`)."""


@dataclass(eq=False, slots=True)
class Stratum:
    """Interchangeable calls, which have the same phase and shape."""

    phase: Hashable
    layers: dict[str, int] = field(default_factory=dict)
    """Index of each module by first appearance."""
    steps: int = 0
    """Number of steps so far with calls of the stratum."""
    _step: int = -1

    def enter(self, step: int) -> None:
        """Count the step of a call."""
        self.steps += step != self._step
        self._step = step


@dataclass(eq=False, slots=True)
class SamplePlace:
    """Calls of one module in one stratum."""

    stratum: Stratum
    module: str
    layer: int
    """Index of the module in the stratum."""


class OfferedCall(NamedTuple):
    """A call that a sampler may keep."""

    call_index: int
    place: SamplePlace
    step: int
    nbytes: int
    difficulty: float | None = None
    """Difficulty of the call; None if the sampler does not need it or it cannot be computed."""
    is_nonfinite: bool = False
    """True if the call is known to have NaN or infinity."""
    size: BatchSize | None = None
    """Figures of an inference engine's batch; None for other calls."""


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
    has_nonfinite: bool = False
    """True once a call with NaN or infinity is kept; a finite call never replaces it."""

    @property
    def kept(self) -> int:
        return len(self.calls)

    def place(self, stratum: tuple[Hashable, ...] | str, module: str) -> SamplePlace:
        """Return the place of a module's calls in one stratum, which begins with the phase."""
        found = self.strata.setdefault(stratum, Stratum(stratum[0]))
        if module not in found.layers:
            found.layers[module] = len(found.layers)
            self.changes += 1
        return SamplePlace(found, module, found.layers[module])

    def wants(self, place: SamplePlace, step: int, size: BatchSize | None = None) -> bool:
        """Return whether the sampler wants to be offered the next call.

        If the result is False, it stays the same for this place and step until `changes` grows.

        Args:
            size: figures of an inference engine's batch; None for other calls.
        """
        return self.kept < self.max_calls

    def offer(self, call: OfferedCall) -> list[int] | None:
        """Return the indices of kept calls to drop for a wanted call; None if it is rejected."""
        dropped: list[OfferedCall] = []
        while self.kept >= self.max_calls or not self._fits(call):
            victim = self._victim(call)
            if victim is None and call.is_nonfinite and not self.has_nonfinite:
                victim = next(reversed(self.calls.values()), None)
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
        self.has_nonfinite = self.has_nonfinite or call.is_nonfinite

    def _remove(self, call: OfferedCall) -> None:
        del self.calls[call.call_index]
        self.nbytes -= call.nbytes


@dataclass
class EverySampler(Sampler):
    """A sampler of the first of every `every` calls."""

    every: int = 1
    _seen: int = 0

    def wants(self, place: SamplePlace, step: int, size: BatchSize | None = None) -> bool:
        self._seen += 1
        self.changes += 1  # so that `wants` is called for every call
        return self.kept < self.max_calls and self._seen % self.every == 1 % self.every


@dataclass
class PerLayerSampler(Sampler):
    """A sampler of one call of each module and phase, or of each at some denoising steps."""

    is_final: ClassVar[bool] = False

    steps: frozenset[int] = frozenset()
    """Denoising steps; empty for one step of each module."""

    _of_layer: dict[tuple[Hashable, ...], OfferedCall] = field(default_factory=dict)

    def wants(self, place: SamplePlace, step: int, size: BatchSize | None = None) -> bool:
        earlier = self._of_layer.get(self._layer(place, step))
        if earlier is None:
            is_named = step in self.steps or not self._has_steps(place)
            return is_named and self.kept < self.max_calls
        if earlier.is_nonfinite or self._has_steps(place):
            return False
        return _drawn(place.module, step) > _drawn(place.module, earlier.step)

    def _has_steps(self, place: SamplePlace) -> bool:
        return bool(self.steps) and place.stratum.phase == DENOISE

    def _layer(self, place: SamplePlace, step: int) -> tuple[Hashable, ...]:
        layer = place.stratum.phase, place.module
        return (*layer, step) if self._has_steps(place) else layer

    def offer(self, call: OfferedCall) -> list[int] | None:
        layer = self._layer(call.place, call.step)
        earlier = self._of_layer.get(layer)
        if earlier is not None:
            self._remove(earlier)
        dropped = super().offer(call)
        if dropped is None:
            if earlier is not None:
                self._add(earlier)
            return None
        kept = {at: each for at, each in self._of_layer.items() if each.call_index in self.calls}
        self._of_layer = {**kept, layer: call}
        self.changes += 1
        return dropped if earlier is None else [*dropped, earlier.call_index]


def _drawn(module: str, step: int) -> int:
    """Return a number that looks random; the step of a module with the largest number is kept."""
    return zlib.crc32(f"{module} {step}".encode())


@dataclass
class HardSampler(Sampler):
    """A sampler of calls with NaN or infinity first, then of the most difficult calls.

    Calls without a difficulty, such as empty ones, are kept if there is room.
    """

    is_final: ClassVar[bool] = False
    by_difficulty: ClassVar[bool] = True

    def wants(self, place: SamplePlace, step: int, size: BatchSize | None = None) -> bool:
        return True

    def _victim(self, call: OfferedCall) -> OfferedCall | None:
        easiest = min([*self.calls.values(), call], key=_hardness)
        return None if easiest is call else easiest


def _hardness(call: OfferedCall) -> tuple[bool, float, int]:
    """Return a sort key; of two equally difficult calls, the earlier one is harder."""
    difficulty = -math.inf if call.difficulty is None else call.difficulty
    return call.is_nonfinite, difficulty, -call.call_index


class Room(NamedTuple):
    """Free room at a position of an axis. A call where there is little room is dropped first."""

    crowd: int
    """Number of kept calls at the position, negated."""
    gap: int = 0
    """Distance between the neighbouring kept positions; 0 if the position itself is kept."""
    nearest: int = 0
    """Distance to the nearer of these neighbours."""


class Axis:
    """Positions of kept calls among steps or layers. Both ends of the axis count as kept.

    Args:
        positions: position of each kept call, from 0.
        end: number of positions so far.
    """

    def __init__(self, positions: Iterable[int], end: int) -> None:
        self._counts = Counter(positions)
        self._kept = [-1, *sorted(self._counts), end]

    def room(self, at: int, without: int | None = None) -> Room:
        """Return the room at a position, without a kept call at the position `without`."""
        crowd = self._counts[at] - (without == at)
        if crowd:
            return Room(-crowd)
        after = bisect.bisect_left(self._kept, at)
        before = after - 1
        after += self._kept[after] == at
        if without != at and without is not None and self._counts[without] == 1:
            before -= self._kept[before] == without
            after += self._kept[after] == without
        low, high = self._kept[before], self._kept[after]
        return Room(0, high - low, min(at - low, high - at))


class DropRank(NamedTuple):
    """Order in which kept calls are dropped: the lowest rank is dropped first."""

    step: tuple[int, int]
    """Crowd and gap of the call's step without the call."""
    layer: Room
    """Room of the call's layer without the call."""
    call_index: int


@dataclass
class SpreadSampler(Sampler):
    """A sampler of calls spread over all strata, steps and layers."""

    is_final: ClassVar[bool] = False

    _last_step: int = 0
    _ranked_at: int = -1
    """Value of `changes` that the fields below belong to."""
    _sizes: Counter[Stratum] = field(default_factory=Counter)
    """Number of kept calls of each stratum."""
    _steps: Axis = field(default_factory=lambda: Axis((), 1))
    _layers: dict[Stratum, Axis] = field(default_factory=dict)
    _ranked: list[DropRank] = field(default_factory=list)
    """Ranks of the kept calls, in order."""

    def wants(self, place: SamplePlace, step: int, size: BatchSize | None = None) -> bool:
        if step > self._last_step:
            self._last_step = step
            self.changes += 1
        place.stratum.enter(step)
        if self.kept < self.max_calls:
            return True
        layers = len(place.stratum.layers)
        if size is not None and place.layer != _drawn("", step) % layers:
            return False  # the layers of a step have the same batch, whose copies may be large
        return self._victim(OfferedCall(-1, place, step, nbytes=0, size=size)) is not None

    def _victim(self, call: OfferedCall) -> OfferedCall | None:
        if self._ranked_at != self.changes:
            self._rank()
        if call.size is not None:
            return self._redundant(call)
        stratum, layer = call.place.stratum, call.place.layer
        own = self._steps.room(call.step)[:2]
        largest = max([self._sizes[stratum] + 1, *self._sizes.values()])
        # The new call itself is refused only if its stratum is one of the largest.
        limit = own if self._sizes[stratum] + 1 == largest else (1, 0)
        # Calls of one step are spread over the layers while a step has several.
        spacing = len(stratum.layers) * stratum.steps // max(self._sizes[stratum], 1)
        is_near = any(
            kept.step == call.step
            and kept.place.stratum is stratum
            and abs(kept.place.layer - layer) < spacing
            for kept in self.calls.values()
        )
        for step, freed, index in self._ranked:
            kept = self.calls[index]
            other, is_same_step = kept.place.stratum, kept.step == call.step
            crowded = own if is_same_step else step  # the new call adds to its step's crowd
            if crowded > limit or self._sizes[other] + (other is stratum) < largest:
                continue
            needed = freed
            if other is stratum:
                if is_near and not is_same_step:
                    continue
                needed = self._layers[stratum].room(layer, kept.place.layer)
            if (needed, limit) > (freed, crowded):
                return kept
        return None

    def _redundant(self, call: OfferedCall) -> OfferedCall | None:
        """Return the kept call that a new batch replaces, or None if it is the new one itself."""
        own, (largest, most) = call.place.stratum, self._sizes.most_common(1)[0]
        crowded = own if self._sizes[own] + 1 >= most else largest
        droppable = [self.calls[rank.call_index] for rank in self._ranked]
        calls = [each for each in droppable if each.place.stratum is crowded]
        if crowded is own:
            calls.append(call)
        batches = [Candidate(each.size, each.place.layer) for each in calls if each.size]
        dropped = calls[redundant(batches) if len(batches) > 1 else 0]
        return None if dropped is call else dropped

    def _rank(self) -> None:
        """Rank the kept calls."""
        layers: dict[Stratum, list[int]] = {}
        for call in self.calls.values():
            layers.setdefault(call.place.stratum, []).append(call.place.layer)
        self._sizes = Counter({stratum: len(kept) for stratum, kept in layers.items()})
        self._layers = {
            stratum: Axis(kept, len(stratum.layers)) for stratum, kept in layers.items()
        }
        self._steps = Axis((call.step for call in self.calls.values()), self._last_step + 1)
        self._ranked = sorted(
            DropRank(
                self._steps.room(call.step, call.step)[:2],
                self._layers[call.place.stratum].room(call.place.layer, call.place.layer),
                call.call_index,
            )
            for call in self.calls.values()
            if not call.is_nonfinite
        )
        self._ranked_at = self.changes

    def _add(self, call: OfferedCall) -> None:
        super()._add(call)
        self.changes += 1

    def _remove(self, call: OfferedCall) -> None:
        super()._remove(call)
        self.changes += 1


def make_sampler(
    sample: str,
    max_calls: int | str,
    max_bytes: int | None,
    steps: Collection[int] | None = None,
) -> Sampler:
    """Create the sampler with the name `sample`, one of `SAMPLES`.

    Args:
        max_calls: largest number of calls, or `per-layer`.
        steps: denoising steps where `per-layer` keeps a call of each module; None for one step.

    Raises:
        ValueError: the name or a limit is invalid.
    """
    if max_bytes is not None:
        max_bytes = positive("max_bytes", max_bytes)
    if max_calls == PER_LAYER:
        if sample != "spread":
            raise ValueError(f"max {PER_LAYER} needs sample spread, not {sample}")
        named = frozenset(natural("steps", step) for step in steps or ())
        return PerLayerSampler(sys.maxsize, max_bytes, steps=named)
    if steps is not None:
        raise ValueError(f"steps need max {PER_LAYER}, not {max_calls}")
    max_calls = positive("max", max_calls)
    samplers = {"spread": SpreadSampler, "hard": HardSampler, "first": Sampler}
    if sample in samplers:
        return samplers[sample](max_calls, max_bytes)
    name, _, every = sample.partition(":")
    if name != "every" or not every.isdecimal() or int(every) < 1:
        raise ValueError(f"sample must be {SAMPLES}, not {sample!r}")
    return EverySampler(max_calls, max_bytes, every=int(every))
