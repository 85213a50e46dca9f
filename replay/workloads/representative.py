"""The order of calls by how representative they are, for replays without time for all calls."""

from __future__ import annotations

from collections.abc import Sequence

from replay.workloads.workload import Workload


def tiers(calls: Sequence[Workload]) -> list[int]:
    """Return a tier for each call. The calls up to any tier are spread over the whole set.

    The first tier has one call of each model, phase and form. The next tiers add calls of each,
    spread over layers and steps: the first, the middle, the quarters, the eighths and so on. A
    synthetic counterpart has the tier of the call before it.
    """
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for place, call in enumerate(calls):
        metadata = call.source.metadata()
        units = groups.setdefault((metadata.model, metadata.phase, metadata.form), [])
        if call.source.is_counterpart and units:
            units[-1].append(place)
        else:
            units.append([place])
    found = [0] * len(calls)
    for units in groups.values():
        for tier, unit in enumerate(halving(len(units))):
            for place in units[unit]:
                found[place] = tier
    return found


def halving(count: int) -> list[int]:
    """Return the numbers below `count`, each far from earlier ones: 0, 4, 2, 6, 1, … for eight."""
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in mirrored if number < count]
