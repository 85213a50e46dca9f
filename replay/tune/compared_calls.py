"""Comparison of kernels on some of a tuning's recorded calls, which stand for all of them.

Times depend on sizes, so calls of one form share their samples. Errors depend on values, and change
gradually over layers and denoising steps: a call that there was no time to compare has those of the
nearest compared call. The plan then runs in the model, whose output is judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from capture.storage.call_file import FileEntry
from replay.plan.plan import DENOISE
from replay.rows.row import Row
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.workloads.sources import RecordedSource


def rounds_of_a_call(entries: Collection[FileEntry], rounds: int) -> int:
    """Return the samples of a kernel on each call, so that each form of call has at least `rounds`.

    A form has the phase, sizes and dtypes of its calls. A call has no fewer samples than an
    interval needs, unless `rounds` is smaller.
    """
    fewest = min(Counter(map(_form, entries)).values(), default=1)
    return min(rounds, max(MINIMUM_ROUNDS, math.ceil(rounds / fewest)))


def of_one_step(entries: Collection[FileEntry]) -> list[FileEntry]:
    """Return the calls of the middle recorded denoising step, and those of other phases.

    Of two middle steps it is the earlier.
    """
    steps = sorted({each.origin.step for each in entries if each.origin.phase == DENOISE})
    middle = steps[(len(steps) - 1) // 2] if steps else 0
    return [each for each in entries if each.origin.phase != DENOISE or each.origin.step == middle]


def with_nearest(rows: Sequence[Row], entries: Sequence[FileEntry]) -> list[Row]:
    """Add, for each recorded call without rows, copies of the rows of the nearest compared call.

    The distance is the difference in the order of the modules, as a share of all, plus that in the
    order of the steps. Only calls of the same form are compared; a call without any keeps no rows.
    """
    rows_of: dict[str, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.call.name, []).append(row)
    compared: dict[object, list[FileEntry]] = {}
    for entry in entries:
        if entry.path.stem in rows_of:
            compared.setdefault(_form(entry), []).append(entry)
    places = _Places.of(entries)
    found = list(rows)
    for entry in entries:
        if entry.path.stem not in rows_of and (alike := compared.get(_form(entry))):
            nearest = min(alike, key=partial(places.distance, entry))
            found += (_moved(row, entry) for row in rows_of[nearest.path.stem])
    return found


@dataclass(frozen=True)
class _Places:
    """Places of modules and steps, from 0 to 1."""

    module: dict[str, float]
    step: dict[int, float]

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> _Places:
        origins = sorted((entry.origin for entry in entries), key=lambda each: each.call_index)
        modules = list(dict.fromkeys(origin.module for origin in origins))
        steps = sorted({origin.step for origin in origins})
        return cls(
            {module: at / len(modules) for at, module in enumerate(modules)},
            {step: at / len(steps) for at, step in enumerate(steps)},
        )

    def distance(self, entry: FileEntry, other: FileEntry) -> float:
        one, two = entry.origin, other.origin
        modules = abs(self.module[one.module] - self.module[two.module])
        return modules + abs(self.step[one.step] - self.step[two.step])


def _form(entry: FileEntry) -> tuple[object, ...]:
    metadata = RecordedSource(entry).metadata()
    return metadata.phase, metadata.shape, metadata.form


def _moved(row: Row, entry: FileEntry) -> Row:
    """Return a row as if it were of another recorded call."""
    origin = entry.origin
    call = replace(
        row.call,
        name=entry.path.stem,
        module=origin.module,
        step=origin.step,
        call_index=origin.call_index,
    )
    return replace(row, call=call)
