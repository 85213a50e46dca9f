"""Order of calls in replays without time for all: the most representative calls come first."""

from __future__ import annotations

from collections.abc import Sequence

from replay.workloads.workload import Workload


def tiers(calls: Sequence[Workload]) -> list[int]:
    """Return a tier for each call, such that calls up to any tier represent all calls.

    The first tier has the first call of each model, phase and form. The next tiers add the middle
    call, those at the quarters, those at the eighths and so on, which spreads the calls over layers
    and steps. A synthetic counterpart has the tier of the recorded call before it.
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
    """Return the numbers below `count`, each far from earlier ones, such as 0, 4, 2, 6, 1, …."""
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in mirrored if number < count]
