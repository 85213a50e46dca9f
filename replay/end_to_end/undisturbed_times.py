"""Run times computed from typical forwards, so that no kernel is blamed for an interruption.

On a shared host, other processes occasionally delay a forward, by a millisecond or by a second. The
same forward in another round is rarely delayed, and neither are most forwards of a run. Occasional
work of the kernel itself looks like a delay, so the excluded time is reported (`delayed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.predicted_times import RUN


def by_round(rounds: Sequence[RunTimes]) -> dict[str, list[float]]:
    """Return seconds by round: one forward of each phase, and the full `RUN`.

    If t(r, i) is the time of a phase's forward i in round r, the forward of a round counts as

        mean over i of typical(i) · median over i of t(r, i) / typical(i)

    where typical(i) is the median of t(r, i) over the rounds. A forward that is slower in every
    round (a longer prompt, a kernel that recompiles at a certain length) counts in full, and so
    does a machine that is slower for most of a run. A delay of fewer than half of a run's forwards
    does not count. With a single forward per phase, the result is its time; with two forwards, it
    is their mean. The full run is its wall time, with each forward replaced by this result.

    A phase that a round lacks is left out. If the number of forwards differs between rounds, or a
    forward takes no measurable time, the mean forward is used instead.
    """
    phases = [
        phase for phase in rounds[0].forwards if all(phase in times.forwards for times in rounds)
    ]
    found = {phase: _forward([times.forwards[phase] for times in rounds]) for phase in phases}
    found[RUN] = [
        times.run
        + sum(
            len(times.forwards[phase]) * found[phase][number] - sum(times.forwards[phase])
            for phase in phases
        )
        for number, times in enumerate(rounds)
    ]
    return found


def delayed(rounds: Sequence[RunTimes]) -> float:
    """Return the share of the rounds' wall time that `by_round` excludes."""
    wall = sum(times.run + times.waited for times in rounds)
    return 1 - sum(by_round(rounds)[RUN]) / wall


def _forward(rounds: Sequence[Sequence[float]]) -> list[float]:
    means = [statistics.fmean(forwards) for forwards in rounds]
    if len({len(forwards) for forwards in rounds}) > 1:
        return means
    typical = [statistics.median(each) for each in zip(*rounds, strict=True)]
    if min(typical) <= 0:
        return means
    return [
        statistics.fmean(typical)
        * statistics.median(one / usual for one, usual in zip(forwards, typical, strict=True))
        for forwards in rounds
    ]
