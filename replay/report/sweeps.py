"""Sweeps: random calls that differ only in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replay.report.groups import Group, joined

LEAST = {"keys": 2, "queries": 3}
"""Least number of lengths of a sweep: prefill and decode of one context are not a sweep."""


@dataclass(frozen=True)
class Sweep:
    """Kinds of call that differ only in length."""

    title: str
    """The sizes that other sweeps of the replay do not share; empty for the only sweep."""
    unit: str
    """`keys`, or `queries` if the number of keys is fixed."""
    lengths: dict[int, int]
    """Index of the kind of call by its length, the shortest length first."""


def sweeps(kinds: Sequence[Group]) -> list[Sweep]:
    """Return the sweeps, as few as hold each call that is part of one.

    The lengths of queries and keys grow together, or one of them is fixed.
    """
    found: dict[tuple[tuple[str, ...], str], dict[int, int]] = {}
    for at, kind in enumerate(kinds):
        call = kind.calls[0]
        if call.phase != "synthetic":
            continue
        q_len, kv_len = call.shape.q_len, call.shape.kv_len
        sizes = str(call.shape._replace(q_len=0, kv_len=0)).replace("×0×", "×S×")
        mask = f"{call.mask.kind} mask" if call.mask else kind.mask  # its sizes change with lengths
        same = (kind.model, sizes, kind.dtype, mask, kind.weights)
        if q_len == kv_len:
            found.setdefault((same, "keys"), {})[kv_len] = at
        found.setdefault(((*same, f"Sq {q_len}"), "keys"), {})[kv_len] = at
        found.setdefault(((*same, f"Sk {kv_len}"), "queries"), {})[q_len] = at
    chosen: dict[tuple[tuple[str, ...], str], dict[int, int]] = {}
    held: set[int] = set()
    # The longest sweeps come first; of equally long ones, those over keys.
    for key, lengths in sorted(found.items(), key=lambda each: (-len(each[1]), each[0][1])):
        if len(lengths) >= LEAST[key[1]] and not held.issuperset(lengths.values()):
            chosen[key] = dict(sorted(lengths.items()))
            held.update(lengths.values())
    properties = [key for key, _ in chosen]
    return [
        Sweep(_title(same, properties), unit, lengths)
        for (same, unit), lengths in sorted(chosen.items(), key=lambda each: min(each[1].values()))
    ]


def _title(same: Sequence[str], all_: Sequence[Sequence[str]]) -> str:
    return joined(*(part for part in same if any(part not in other for other in all_)))
