"""Samples calls from a run of unknown length.

`spread` decides call by call and may drop a kept call for a new one, so that the kept calls are
always spread evenly over the calls seen so far:

- Calls of one phase and shape form a stratum. Strata get equal shares of the sample; a stratum with
  fewer calls than its share leaves the rest to the others.
- Within a stratum, the call whose layer and step have the most kept calls is dropped first. Ties
  are broken by frac(l/g + s/g²) for layer l and step s, with g the plastic number: the points of
  that sequence below a threshold form an even lattice over layers × steps (M. Roberts, "The
  unreasonable effectiveness of quasirandom sequences", 2018), whatever their number.

Keeping N of T calls this way writes a small multiple of N files (83 for 10 of 1500), of which N
remain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

_PLASTIC = 1.324717957244746


class Kept(NamedTuple):
    call_index: int
    layer: int
    step: int
    nbytes: int

    @property
    def priority(self) -> float:
        return (self.layer / _PLASTIC + self.step / _PLASTIC**2) % 1.0


class Decision(NamedTuple):
    """Whether to keep the offered call, and the indices of the calls to drop for it."""

    keep: bool
    drop: tuple[int, ...] = ()


REJECTED = Decision(keep=False)


@dataclass
class FirstSampler:
    """Keeps the first `max_calls` calls that fit in `max_bytes`."""

    max_calls: int
    max_bytes: int | None = None
    kept: int = 0
    nbytes: int = 0
    refused_for_bytes: int = 0

    def offer(
        self, call_index: int, stratum: Hashable, module: str, step: int, nbytes: int
    ) -> Decision:
        if self.kept == self.max_calls:
            return REJECTED
        if self.max_bytes is not None and self.nbytes + nbytes > self.max_bytes:
            self.refused_for_bytes += 1
            return REJECTED
        self.kept += 1
        self.nbytes += nbytes
        return Decision(keep=True)


@dataclass
class SpreadSampler:
    """Keeps up to `max_calls` calls that fit in `max_bytes`, over all strata, layers and steps."""

    max_calls: int
    max_bytes: int | None = None
    kept: int = 0
    nbytes: int = 0
    refused_for_bytes: int = 0
    _strata: dict[Hashable, list[Kept]] = field(default_factory=dict)
    _layers: dict[Hashable, dict[str, int]] = field(default_factory=dict)

    def offer(
        self, call_index: int, stratum: Hashable, module: str, step: int, nbytes: int
    ) -> Decision:
        """Decide whether to keep the next call; the caller deletes the dropped ones.

        Args:
            call_index: identifies the call in later decisions.
            stratum: what makes calls interchangeable: phase and shape.
            module: the layer; the order of first appearance is its coordinate.
            step: the other coordinate.
            nbytes: the call's size.
        """
        layers = self._layers.setdefault(stratum, {})
        call = Kept(call_index, layers.setdefault(module, len(layers)), step, nbytes)
        self._add(stratum, call)
        dropped: list[tuple[Hashable, Kept]] = []
        while not self._fits():
            victim = self._most_crowded(self._stratum_to_shrink(stratum))
            dropped.append(victim)
            self._remove(*victim)
            if victim[1] is call:
                if self.kept + len(dropped) <= self.max_calls:
                    self.refused_for_bytes += 1
                for owner, other in dropped[:-1]:
                    self._add(owner, other)
                return REJECTED
        return Decision(keep=True, drop=tuple(other.call_index for _, other in dropped))

    def _fits(self) -> bool:
        within_bytes = self.max_bytes is None or self.nbytes <= self.max_bytes
        return self.kept <= self.max_calls and within_bytes

    def _stratum_to_shrink(self, newest: Hashable) -> Hashable:
        """Return the largest stratum, or `newest` if no other is larger."""
        largest = max(self._strata, key=lambda stratum: len(self._strata[stratum]))
        return largest if len(self._strata[largest]) > len(self._strata[newest]) else newest

    def _most_crowded(self, stratum: Hashable) -> tuple[Hashable, Kept]:
        calls = self._strata[stratum]
        per_layer = Counter(call.layer for call in calls)
        per_step = Counter(call.step for call in calls)
        return stratum, max(
            calls,
            key=lambda call: (
                per_layer[call.layer] + per_step[call.step],
                call.priority,
                call.call_index,
            ),
        )

    def _add(self, stratum: Hashable, call: Kept) -> None:
        self._strata.setdefault(stratum, []).append(call)
        self.kept += 1
        self.nbytes += call.nbytes

    def _remove(self, stratum: Hashable, call: Kept) -> None:
        self._strata[stratum].remove(call)
        self.kept -= 1
        self.nbytes -= call.nbytes


Sampler = FirstSampler | SpreadSampler


def make_sampler(name: str, max_calls: int, max_bytes: int | None) -> Sampler:
    """Create the `spread` or `first` sampler.

    Raises:
        ValueError: another name, or a limit below 1.
    """
    if max_calls < 1:
        raise ValueError(f"max must be at least 1, not {max_calls}")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")
    if name == "spread":
        return SpreadSampler(max_calls, max_bytes)
    if name == "first":
        return FirstSampler(max_calls, max_bytes)
    raise ValueError(f"sample must be 'spread' or 'first', not {name!r}")
