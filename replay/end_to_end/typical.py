"""What a run takes by its forwards' typical times, so that an interruption is no kernel's fault.

On a shared host something else delays a forward now and then, for a millisecond or for a second.
The same forward of another round is rarely hit, and most forwards of a run are not. What a kernel
itself does now and then looks the same, so how much was left out is told (`delayed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.span import RUN


def by_round(rounds: Sequence[RunTimes]) -> dict[str, list[float]]:
    """Seconds by round: of each phase one forward, of `RUN` the whole.

    With t the times of a phase's forwards, by round r and place i in the run, a round's forward is

        mean over i of typical(i) · median over i of t(r, i) / typical(i)

    where typical(i) is the median of t(r, i) over the rounds. So what one forward always takes
    longer than the others counts in full (a longer prompt, a kernel that compiles again at a
    certain length), a machine that is slower for most of a run does as well, and what delays fewer
    than half of a run's forwards does not. Where a phase has one forward, it is that one's time; of
    two it is their mean. The whole run is its wall time, with that in place of each forward.

    Phases that not every round has are left out; of a phase whose number of forwards differs from
    round to round, or where one takes no measurable time, it is the mean forward.
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
    """The share of the rounds' wall time that `by_round` leaves out."""
    wall = sum(times.run for times in rounds)
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
