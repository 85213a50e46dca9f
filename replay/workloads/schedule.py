"""The order in which calls are replayed, whoever replays them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from replay.workloads.outline import outline
from replay.workloads.recorded import Workload

Form = tuple[object, ...]
"""Of `replay.workloads.outline.Outline`."""


class Schedule:
    """Gives out calls one at a time.

    Whoever has had a call of some form gets the others of that form, as long as there are some: its
    kernels are compiled for it. Else it gets one of a form that nobody has had, or of the form with
    the most calls left.

    Args:
        calls: the first of which are given out first, where that is all the same.
        tiers: of each call; none is given out before those of a lower tier.
        is_in_time: whether a call may still begin; one that may not is left out.
    """

    def __init__(
        self,
        calls: Sequence[Workload],
        tiers: Sequence[int] | None = None,
        is_in_time: Callable[[Workload], bool] = lambda workload: True,
    ) -> None:
        self.calls = list(calls)
        self.left_out: list[Workload] = []
        """Those that could not begin in time."""
        self._is_in_time = is_in_time
        self._groups: dict[int, dict[Form, deque[int]]] = {}
        """Places among the calls of those that wait, by tier and form."""
        self._group_of: list[deque[int]] = []
        for place, (call, tier) in enumerate(zip(calls, tiers or [0] * len(calls), strict=True)):
            of_tier = self._groups.setdefault(tier, {})
            self._group_of.append(of_tier.setdefault(outline(call).form, deque()))
            self._group_of[-1].append(place)
        self._given: dict[Form, set[Hashable]] = {}
        """Who has had a call of a form."""
        self._refused: dict[int, set[Hashable]] = {}
        """Who shall not have a call again."""

    def __iter__(self) -> Iterator[Workload]:
        """Give out all in the order of their tiers and then their own, to one who takes all."""
        while (call := self.take()) is not None:
            yield call

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def waiting(self) -> int:
        """Number of calls that were neither taken nor left out."""
        return sum(len(places) for of_tier in self._groups.values() for places in of_tier.values())

    def take(self, taker: Hashable = None) -> Workload | None:
        """The next call for one of several takers; None where there is none that it may have."""
        while (found := self._next(taker)) is not None:
            form, place = found
            self._group_of[place].remove(place)
            call = self.calls[place]
            if self._is_in_time(call):
                self._given.setdefault(form, set()).add(taker)
                return call
            self.left_out.append(call)
        return None

    def prefer(self, call: Workload, taker: Hashable) -> None:
        """Note that somebody is ready for calls of this form, as if it had had one."""
        self._given.setdefault(outline(call).form, set()).add(taker)

    def give_back(self, call: Workload, taker: Hashable) -> None:
        """Let another have a call that this taker failed at."""
        place = next(place for place, each in enumerate(self.calls) if each is call)
        self._refused.setdefault(place, set()).add(taker)
        self._group_of[place].appendleft(place)

    def _next(self, taker: Hashable) -> tuple[Form, int] | None:
        """The form and place of what a taker gets next."""
        for _, of_tier in sorted(self._groups.items()):
            best: tuple[tuple[int, int, int], Form, int] | None = None
            for form, places in of_tier.items():
                able = (each for each in places if taker not in self._refused.get(each, ()))
                if (place := next(able, None)) is None:
                    continue
                takers = self._given.get(form, ())
                if taker is None or taker in takers:
                    preference = (0, 0, place)
                else:
                    preference = (2, -len(places), place) if takers else (1, 0, place)
                if best is None or preference < best[0]:
                    best = preference, form, place
            if best is not None:
                return best[1:]
        return None
