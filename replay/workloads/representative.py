"""Which calls are most representative, for when there is no time for all."""

from __future__ import annotations

from collections.abc import Sequence

from replay.workloads.call_metadata import outline
from replay.workloads.recorded import Workload


def tiers(calls: Sequence[Workload]) -> list[int]:
    """For each call its tier: the calls up to any tier are spread over what there is.

    The first tier has one call of each model, phase and form, the next one more of each, spread
    over its layers and steps: the first, the middle, the quarters, the eighths and so on. Twins are
    in the tier of the call that they follow.
    """
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for place, call in enumerate(calls):
        told = outline(call)
        units = groups.setdefault((told.model, told.phase, told.form), [])
        if call.source.get("kind") == "twin" and units:
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
    """The numbers below `count`, each far from those before it: 0, 4, 2, 6, 1, … for eight."""
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in mirrored if number < count]
