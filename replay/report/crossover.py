"""Crossovers: lengths at which the order of a kernel and the baseline changes in a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile

from replay.report.groups import names_by_sentence
from replay.report.matrix import Cell, Matrix
from replay.report.sweeps import Sweep, sweeps
from replay.rows.row import KernelId


@dataclass(frozen=True)
class Crossover:
    """The only change of a kernel from slower to faster, or back, as a sweep's length grows."""

    slower: int
    """The measured length next to the crossover at which the kernel is slower."""
    faster: int
    """The measured length next to the crossover at which it is faster."""
    end: int | None
    """Last length, away from the crossover, up to which it stays faster; None for all lengths."""
    place: float | None
    """Interpolated length at which both are equally fast.

    None if other lengths lie between `slower` and `faster`: ties, or undecided ones.
    """

    @property
    def is_gain(self) -> bool:
        """True if the kernel becomes faster as the length grows."""
        return self.slower < self.faster

    def sentence(self, unit: str) -> str:
        """Describe the crossover, such as `faster from about 1,900 keys on (slower at …)`."""
        near = f"{self.faster:,}" if self.place is None else f"about {_rounded(self.place)}"
        if self.end is None:
            where = f"from {near} {unit} on" if self.is_gain else f"up to {near} {unit}"
        elif near == f"{self.end:,}":
            where = f"at {near} {unit}"
        else:
            first, last = (near, f"{self.end:,}") if self.is_gain else (f"{self.end:,}", near)
            where = f"from {first} to {last} {unit}"
        slower, faster = f"slower at {self.slower:,}", f"faster at {self.faster:,}"
        measured = f"{slower}, {faster}" if self.is_gain else f"{faster}, {slower}"
        return f"faster {where} ({measured}{', neither between' if self.place is None else ''})"


def crossover(cells: Mapping[int, Cell]) -> Crossover | None:
    """Return a kernel's crossover; None without one, with several, or if the kernel is wrong.

    A kernel is faster, or slower, where the whole interval of its speed-up lies on one side of 1.
    The logarithm of the speed-up is taken as linear in the logarithm of the length.

    Args:
        cells: the kernel's result at each length, the shortest length first.
    """
    if any(cell.outcome == "wrong" for cell in cells.values()):
        return None
    decided = [length for length, cell in cells.items() if cell.outcome in ("faster", "slower")]
    changes = [
        pair for pair in pairwise(decided) if cells[pair[0]].outcome != cells[pair[1]].outcome
    ]
    if len(changes) != 1:
        return None
    ((one, other),) = changes
    lengths = list(cells)
    if cells[other].outcome == "faster":
        slower, faster, side = one, other, lengths[lengths.index(other) :]
    else:
        slower, faster, side = other, one, lengths[lengths.index(one) :: -1]
    stays = list(takewhile(lambda length: cells[length].outcome == "faster", side))
    are_neighbours = (one, other) in pairwise(lengths)
    return Crossover(
        slower,
        faster,
        end=None if stays == side else stays[-1],
        place=_interpolated(cells, one, other) if are_neighbours else None,
    )


def crossovers(found: Matrix, sweep: Sweep) -> Iterator[tuple[KernelId, Crossover]]:
    """Yield the kernels that have a crossover in a sweep."""
    for kernel in found.kernels:
        cells = {length: found.cells[kernel, at] for length, at in sweep.lengths.items()}
        if change := crossover(cells):
            yield kernel, change


def crossover_lines(found: Matrix) -> Iterator[str]:
    """Yield a line for each crossover, and one for the sweeps that have none."""
    without = []
    for sweep in sweeps(found.kinds):
        title = f"{sweep.title}: " if sweep.title else ""
        changes = list(crossovers(found, sweep))
        for kernel, change in changes:
            yield f"{title}{found.label(kernel)}: {change.sentence(sweep.unit)}"
        if not changes:
            first, *_, last = sweep.lengths
            sentence = f"no crossover shown from {first:,} to {last:,} {sweep.unit}"
            without.append((sweep.title, f"{sentence}{_why_not(found, sweep)}"))
    for sentence, titles in names_by_sentence(without).items():
        yield f"{titles}: {sentence}" if titles else sentence


def _why_not(found: Matrix, sweep: Sweep) -> str:
    """Return why a sweep may hide a crossover; empty if its results exclude one."""
    rows = [[found.cells[kernel, at] for at in sweep.lengths.values()] for kernel in found.kernels]
    outcomes = [[cell.outcome for cell in cells] for cells in rows]
    rivals = [each for each in outcomes if not {"baseline", "wrong"}.intersection(each)]
    undecided = sum("inconclusive" in at_length for at_length in zip(*rivals, strict=True))
    if undecided:
        return f": undecided at {undecided} of {len(sweep.lengths)} lengths"
    is_any_able = any(outcome != "cannot" for each in rivals for outcome in each)
    return "" if is_any_able else ": no kernel but the baseline ran correctly at all of them"


def _interpolated(cells: Mapping[int, Cell], one: int, other: int) -> float:
    """Return the length between two at which the speed-up is 1."""
    before, after = cells[one].speedup, cells[other].speedup
    assert before is not None
    assert after is not None
    share = math.log(before.ratio) / (math.log(before.ratio) - math.log(after.ratio))
    return float(one * (other / one) ** share)


def _rounded(length: float) -> str:
    """Format a length with two significant digits."""
    return f"{round(length, 1 - math.floor(math.log10(length))):,.0f}"
