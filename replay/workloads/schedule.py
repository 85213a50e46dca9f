"""The order in which calls are replayed, whoever replays them."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from replay.workloads.call_metadata import outline
from replay.workloads.recorded import Workload

Form = tuple[object, ...]
"""That of `replay.workloads.call_metadata.Outline`, behind the type of device."""


class Schedule:
    """Gives out calls one at a time.

    Whoever has had a call of some form gets the others of that form, as long as there are some: its
    kernels are compiled for it. Else it gets one of a form that nobody has had, or of the form of
    which most is left. Long calls come before short ones, so that all takers end at about the same
    time; so whoever has less left than another gets a call of any form that is longer than its own.

    Args:
        calls: the first of which are given out first, where that is all the same.
        tiers: of each call; none is given out before those of a lower tier.
        is_in_time: whether a call may still begin; one that may not is left out.
        seconds: that each call may take; all the same if not given.
    """

    def __init__(
        self,
        calls: Sequence[Workload],
        tiers: Sequence[int] | None = None,
        is_in_time: Callable[[Workload], bool] = lambda workload: True,
        seconds: Sequence[float] | None = None,
    ) -> None:
        self.calls = list(calls)
        self.left_out: list[Workload] = []
        """Those that could not begin in time."""
        self._is_in_time = is_in_time
        self._forms = [_form(call) for call in calls]
        self._tiers = [0] * len(calls) if tiers is None else list(tiers)
        self._seconds = [1.0] * len(calls) if seconds is None else list(seconds)
        self._waiting: dict[int, dict[Form, list[int]]] = {}
        """Places among the calls, by tier and form; nothing is empty."""
        self._left: dict[tuple[int, Form], float] = defaultdict(float)
        """Seconds that these take together."""
        for place in range(len(calls)):
            self._add(place)
        self._had: dict[Hashable, set[Form]] = {}
        """The forms that each taker has had a call of."""
        self._begun: set[Form] = set()
        """Those that anybody has."""
        self._refused: dict[int, set[Hashable]] = {}
        """Who shall not have a call again."""

    def __iter__(self) -> Iterator[Workload]:
        """Give out all in the order of their tiers and then their own, to one who takes all."""
        for place in sorted(range(len(self.calls)), key=self._tiers.__getitem__):
            self._remove(place)
            if self._may_begin(place):
                yield self.calls[place]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def waiting(self) -> int:
        """Number of calls that were neither taken nor left out."""
        return sum(len(places) for forms in self._waiting.values() for places in forms.values())

    def take(self, taker: Hashable, kind: str = "") -> Workload | None:
        """The next call for one of several takers; None where there is none that it may have.

        Args:
            kind: the type of device that the taker is.
        """
        while (place := self._next(taker, kind)) is not None:
            self._remove(place)
            if self._may_begin(place):
                self._note(self._forms[place], taker)
                return self.calls[place]
        return None

    def prefer(self, call: Workload, taker: Hashable) -> None:
        """Note that somebody is ready for calls of this form, as if it had had one."""
        self._note(_form(call), taker)

    def give_back(self, call: Workload, taker: Hashable) -> None:
        """Let another have a call that this taker failed at."""
        place = next(place for place, each in enumerate(self.calls) if each is call)
        self._refused.setdefault(place, set()).add(taker)
        self._add(place)

    def _next(self, taker: Hashable, kind: str) -> int | None:
        """The place of what a taker gets next."""
        own = self._had.get(taker, set())

        def first(form: Form) -> int | None:
            if form[0] not in ("", kind):
                return None
            able = (each for each in forms[form] if taker not in self._refused.get(each, ()))
            return next(able, None)

        def longest(forms: Iterable[Form]) -> int | None:
            """Of the calls that come first in their forms."""
            able = (place for form in forms if (place := first(form)) is not None)
            return min(able, key=lambda place: (-self._seconds[place], place), default=None)

        def left(had: set[Form]) -> float:
            """Seconds of these forms that wait, for takers of this kind."""
            there = (form for form in had & forms.keys() if form[0] in ("", kind))
            return sum(self._left[tier, form] for form in there)

        for tier, forms in sorted(self._waiting.items()):
            place, other = longest(own & forms.keys()), longest(forms.keys() - own)
            if place is not None and other is not None:
                is_longer = self._seconds[other] > self._seconds[place]
                if is_longer and left(own) < max(map(left, self._had.values())):
                    return other
            if place is None:
                place = longest(forms.keys() - self._begun)
            if place is not None:
                return place
            for form in sorted(forms, key=lambda form: self._left[tier, form], reverse=True):
                if (place := first(form)) is not None:
                    return place
        return None

    def _may_begin(self, place: int) -> bool:
        call = self.calls[place]
        if not self._is_in_time(call):
            self.left_out.append(call)
            return False
        return True

    def _note(self, form: Form, taker: Hashable) -> None:
        self._had.setdefault(taker, set()).add(form)
        self._begun.add(form)

    def _add(self, place: int) -> None:
        forms = self._waiting.setdefault(self._tiers[place], {})
        self._left[self._tiers[place], self._forms[place]] += self._seconds[place]
        bisect.insort(forms.setdefault(self._forms[place], []), place)

    def _remove(self, place: int) -> None:
        forms = self._waiting[self._tiers[place]]
        places = forms[self._forms[place]]
        places.remove(place)
        self._left[self._tiers[place], self._forms[place]] -= self._seconds[place]
        if not places:
            del forms[self._forms[place]]


def _form(call: Workload) -> Form:
    return (call.on, *outline(call).form)
