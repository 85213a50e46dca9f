"""The calls that a recording has seen, counted with those like them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.hooks.census import CallCount, Census
from capture.hooks.interceptor import Arguments
from capture.hooks.modes import outside_of_modes
from capture.hooks.modules import CallSite, matches
from capture.hooks.phases import RECOMPUTE
from capture.recording.context import RecordingContext
from capture.recording.sampling import SamplePlace


@dataclass(eq=False, slots=True)
class SimilarCalls:
    """Calls that are counted together, and among which the sampler chooses."""

    count: CallCount
    place: SamplePlace | None
    """None where calls are not to be stored."""
    refused_step: int = -1
    """The step in which the sampler last wanted none of them."""
    refused_at: int = -1
    """Its `changes` then."""


class SeenCalls:
    """All calls of a recording, stored or not.

    Args:
        lock: held while a call is looked at that is like no earlier one.
    """

    def __init__(self, context: RecordingContext, lock: threading.RLock) -> None:
        self.census = Census()
        self.groups: dict[tuple[object, ...], SimilarCalls] = {}
        """By what is quickly read from a call."""
        self._places: dict[CallCount, SamplePlace | None] = {}
        self._tracker, self._sampler = context.tracker, context.sampler
        self._options = context.options
        self._lock = lock
        self._visits: dict[str, list[int]] = {}
        """By module: the step of its latest call, and that call's position in the step."""

    def visit(self, site: CallSite) -> None:
        """Count a call of a module in its step, by which ranks' calls are matched."""
        latest = self._visits.setdefault(site.module, [-1, 0])
        latest[1] = latest[1] + 1 if latest[0] == site.step else 0
        latest[0] = site.step

    def position(self, site: CallSite) -> int:
        """The position of a module's latest call in its step, from 0; it was visited."""
        return self._visits[site.module][1]

    def find(
        self,
        like: tuple[object, ...] | None,
        site: CallSite,
        arguments: Arguments,
        dtype: torch.dtype | None,
    ) -> SimilarCalls:
        """Find out about calls like one that is met for the first time.

        Args:
            like: what to find it by the next time; None if that cannot be told.
            dtype: what autocast casts the arguments to.
        """
        with self._lock:
            with outside_of_modes():
                count = self.census.count_of(site, arguments, dtype)
            if count not in self._places:
                self._places[count] = self._place(site, count)
            found = SimilarCalls(count, self._places[count])
            # A nested tensor is unlike any other, and so is NaN; of a tensor as an option, only its
            # identity is.
            has_nan = count.signature.scale is math.nan
            if like and not (
                has_nan or arguments.query.is_nested or any(isinstance(e, Tensor) for e in like)
            ):
                with contextlib.suppress(TypeError):  # symbolic sizes have no hash
                    found = self.groups.setdefault(like, found)
            return found

    @property
    def summary(self) -> str:
        """One line: by component, how many calls were kept, eligible, and not to be sampled.

        Empty for one component whose calls were all eligible.
        """
        eligible, others = Counter[str](), Counter[str]()
        kept = Counter[str]()
        for (module, phase, _), count in self.census.items():
            component = self._tracker.component(module)
            if phase == RECOMPUTE:
                others[f"{component} ({phase})".strip()] += count.calls
            elif self._places.get(count) is None:
                others[component or "other modules"] += count.calls
            else:
                eligible[component] += count.calls
                kept[component] += count.kept
        if len(eligible) == 1 and not others:
            return ""
        told = ", ".join(
            f"{component}{': ' if component else ''}{kept[component]} of {count}"
            for component, count in eligible.items()
        )
        line = f"kept of the eligible calls: {told or 'none'}"
        if others:
            line += "; not sampled: " + ", ".join(f"{name} {n}" for name, n in others.items())
        return line

    def _place(self, site: CallSite, count: CallCount) -> SamplePlace | None:
        """Return where calls like these are sampled; None if they are not to be stored."""
        options = self._options
        if count.signature.refusal or not site.module or not matches(site.module, options.modules):
            return None
        if site.phase == RECOMPUTE or options.phase not in ("", site.phase):
            return None
        return self._sampler.place((site.phase, *count.signature.stratum), site.module)
