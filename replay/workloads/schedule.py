"""Order in which one or more takers replay calls."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from replay.workloads.workload import Workload

Form = tuple[object, ...]
"""Type of device, followed by `CallMetadata.form`."""


class Schedule:
    """Schedule that hands out calls one at a time.

    A taker first gets calls of the forms that it has had, because its kernels are compiled for
    them. After that, it gets a call of a form that no taker has had, or of the form with the most
    remaining work. Long calls come before short ones, so that all takers end at about the same
    time. For the same reason, a taker with less remaining work than another taker gets a call of
    another form if that call is longer than those of its own forms.

    Args:
        calls: the calls to hand out; earlier calls come first if all else is equal.
        tiers: a tier for each call; lower tiers come first.
        is_in_time: function that returns True if a call may still begin; others are left out.
        seconds: expected duration of each call; all are equal by default.
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
        """Calls that could not begin in time."""
        self._is_in_time = is_in_time
        self._forms = [_form(call) for call in calls]
        self._tiers = [0] * len(calls) if tiers is None else list(tiers)
        self._seconds = [1.0] * len(calls) if seconds is None else list(seconds)
        self._waiting: dict[int, dict[Form, list[int]]] = {}
        """Indices of waiting calls, by tier and form, without empty lists."""
        self._left: dict[tuple[int, Form], float] = defaultdict(float)
        """Expected seconds of waiting calls, by tier and form."""
        for place in range(len(calls)):
            self._add(place)
        self._had: dict[Hashable, set[Form]] = {}
        """Forms of the calls that were handed to each taker."""
        self._begun: set[Form] = set()
        self._refused: dict[int, set[Hashable]] = {}
        """Takers that failed at a call, by the index of the call."""

    def __iter__(self) -> Iterator[Workload]:
        """Hand out all calls to one taker, by tier, and in the given order within a tier."""
        for place in sorted(range(len(self.calls)), key=self._tiers.__getitem__):
            self._remove(place)
            if self._may_begin(place):
                yield self.calls[place]

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def waiting(self) -> int:
        """Number of calls that have been neither taken nor left out."""
        return sum(len(places) for forms in self._waiting.values() for places in forms.values())

    def take(self, taker: Hashable, kind: str = "") -> Workload | None:
        """Take the next call for one of several takers; return None if this taker has no call left.

        Args:
            kind: type of the taker's device.
        """
        while (place := self._next(taker, kind)) is not None:
            self._remove(place)
            if self._may_begin(place):
                self._note(self._forms[place], taker)
                return self.calls[place]
        return None

    def prefer(self, call: Workload, taker: Hashable) -> None:
        """Prefer calls with the form of this call for a taker."""
        self._note(_form(call), taker)

    def give_back(self, call: Workload, taker: Hashable) -> None:
        """Put back a call that this taker failed at, so that other takers can take it."""
        place = next(place for place, member in enumerate(self.calls) if member is call)
        self._refused.setdefault(place, set()).add(taker)
        self._add(place)

    def _next(self, taker: Hashable, kind: str) -> int | None:
        own = self._had.get(taker, set())

        def first(form: Form) -> int | None:
            if form[0] not in ("", kind):
                return None
            able = (place for place in forms[form] if taker not in self._refused.get(place, ()))
            return next(able, None)

        def longest(forms: Iterable[Form]) -> int | None:
            """Return the longest call among the first calls of these forms."""
            able = (place for form in forms if (place := first(form)) is not None)
            return min(able, key=lambda place: (-self._seconds[place], place), default=None)

        def left(had: set[Form]) -> float:
            """Return the expected seconds of waiting calls with these forms on this device."""
            waiting = (form for form in had & forms.keys() if form[0] in ("", kind))
            return sum(self._left[tier, form] for form in waiting)

        for tier, forms in sorted(self._waiting.items()):
            place, other = longest(own & forms.keys()), longest(forms.keys() - own)
            if place is not None and other is not None:
                # If another worker has more work left, take a long call that it would get.
                is_longer = self._seconds[other] > self._seconds[place]
                if is_longer and left(own) < max(map(left, self._had.values())):
                    return other
            if place is None:
                place = longest(forms.keys() - self._begun)
            if place is not None:
                return place
            # Every form has a taker, so help with the form that has the most work left.
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
    return (call.on, *call.source.metadata().form)
