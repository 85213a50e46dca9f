"""Solver of the multiple-choice knapsack: the fastest choices within a total error.

Each cell has options with a time and an error energy, and one option is chosen for each cell. The
total time is minimised, while the sum of the energies stays within a budget. Energies (squares of
relative errors) add up, decibels do not.

The relaxation that may mix two options of a cell has a simple optimum: all cells start at their
least energy and take the steps along their lower convex hulls in the order of time saved per
energy, until the budget is spent (Sinha and Zoltners, "The Multiple-Choice Knapsack Problem",
Operations Research 27, 1979). Its time is a bound on every choice, the Lagrangian dual. The steps
that still fit make a choice whose time is within one step of the bound. If the difference is
relevant, mostly in small problems, a search over the options that can still improve follows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter, itemgetter
from typing import NamedTuple

ROUNDING = 1e-12
"""Relative excess over a budget that counts as a rounding error of the sum."""

CLOSE = 1e-5
"""Gap below which the search for a better choice is not worth its time."""

WIDTH = 500
"""Maximum number of partial choices that the search keeps after each cell."""

MOST = 100
"""Maximum number of choices for a group of cells that are not on convex hulls."""


class Option(NamedTuple):
    """Option of a cell. It is never chosen if a figure is NaN or infinite."""

    name: str
    ms: float
    energy: float
    """Error energy, at least 0."""


@dataclass(frozen=True)
class Solution:
    """Choice of an option for each cell."""

    choices: list[int]
    """Index of each cell's chosen option."""
    objective: float
    """Total time in milliseconds."""
    energy: float
    """Sum of the energies."""
    bound: float
    """Lower bound in milliseconds of the total time of every choice within the budget."""
    is_feasible: bool
    """False if no choice is within the budget; then each cell has its first option."""

    @property
    def gap(self) -> float:
        """Largest share of the time that a better choice could save; 0 if this one is optimal."""
        return (self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


def solve(cells: Sequence[Sequence[Option]], budget: float) -> Solution:
    """Choose an option for each cell, so that the total time is small and the error in budget.

    Args:
        cells: options of each cell; the first one is the baseline.
        budget: the largest sum of energies, which rounding may exceed by `ROUNDING` of it.

    Returns:
        A choice within the budget, and the bound that shows how good it is. If no choice is within
        the budget, the baseline of each cell.
    """
    limit = budget * (1 + ROUNDING)
    frontiers = [_frontier(options) for options in cells]
    if not all(frontiers) or math.fsum(points[0].energy for points in frontiers) > limit:
        return _solution(cells, [0] * len(cells), None)
    chosen, bound, price = _relaxed(frontiers, limit)
    objective = math.fsum(point.ms for point in chosen)
    if objective - bound > CLOSE * objective:
        chosen, is_optimal = _searched(frontiers, limit, chosen, bound, price)
        bound = math.fsum(point.ms for point in chosen) if is_optimal else bound
    return _solution(cells, [point.option for point in chosen], bound)


def joint_choices(cells: Sequence[Sequence[Option]]) -> list[list[int]]:
    """Return choices for a group of cells as indices of options, the most exact first.

    These are all choices that no other one beats in time and energy, if they are at most `MOST`.
    Otherwise they are the steps along the cells' lower convex hulls, in the order of time saved per
    energy. Every cell has an option without NaN and infinity.
    """
    frontiers = [_frontier(options) for options in cells]
    partials = [_Partial(0.0, 0.0, 0.0, None)]
    for frontier in frontiers:
        partials = _undominated(
            _Partial(one.energy + point.energy, one.ms + point.ms, 0.0, (point, one.path))
            for one in partials
            for point in frontier
        )
        if len(partials) > MOST:
            return _along_hulls(frontiers)
    return [[point.option for point in _points(partial.path)][::-1] for partial in partials]


def _along_hulls(frontiers: Sequence[Sequence[_Point]]) -> list[list[int]]:
    chosen = [frontier[0].option for frontier in frontiers]
    found = [list(chosen)]
    for _, cell, point in _steps(frontiers):
        chosen[cell] = point.option
        found.append(list(chosen))
    return found


def _solution(
    cells: Sequence[Sequence[Option]], choices: list[int], bound: float | None
) -> Solution:
    """Return the solution of these choices; without a bound, no choice is within the budget."""
    options = [cell[index] for cell, index in zip(cells, choices, strict=True)]
    objective = math.fsum(option.ms for option in options)
    energy = math.fsum(option.energy for option in options)
    lowest = objective if bound is None else min(bound, objective)
    return Solution(choices, objective, energy, lowest, bound is not None)


class _Point(NamedTuple):
    """Option of a cell that can be part of an optimum."""

    energy: float
    ms: float
    option: int
    """Index of the option."""


def _frontier(options: Iterable[Option]) -> list[_Point]:
    """Return the options that no other option beats in time and energy, least energy first."""
    points = sorted(
        _Point(option.energy, option.ms, index)
        for index, option in enumerate(options)
        if math.isfinite(option.ms) and math.isfinite(option.energy)
    )
    frontier: list[_Point] = []
    for point in points:
        if not frontier or point.ms < frontier[-1].ms:
            frontier.append(point)
    return frontier


def _hull(frontier: Iterable[_Point]) -> list[_Point]:
    """Return the points of a frontier that lie on its lower convex hull."""
    hull: list[_Point] = []
    for point in frontier:
        while len(hull) > 1 and _slope(hull[-1], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: _Point, other: _Point) -> float:
    """Return the time saved per energy on the step between two points."""
    return (one.ms - other.ms) / (other.energy - one.energy)


def _steps(frontiers: Sequence[Sequence[_Point]]) -> list[tuple[float, int, _Point]]:
    """Return the steps along the cells' hulls as slope, cell and point, the steepest first."""
    steps = [
        (_slope(one, other), cell, other)
        for cell, frontier in enumerate(frontiers)
        for one, other in itertools.pairwise(_hull(frontier))
    ]
    return sorted(steps, key=lambda step: (-step[0], step[1]))


def _relaxed(
    frontiers: Sequence[Sequence[_Point]], limit: float
) -> tuple[list[_Point], float, float]:
    """Take the best steps along the cells' hulls that fit into the limit.

    Returns:
        The point of each cell; the bound in milliseconds; and the price of energy, in milliseconds
        for each unit of energy, which is 0 if all steps fit.
    """
    steps = _steps(frontiers)
    chosen = [frontier[0] for frontier in frontiers]
    energy = math.fsum(point.energy for point in chosen)
    bound, price = None, 0.0
    for slope, cell, point in steps:
        more = point.energy - chosen[cell].energy
        if energy + more <= limit:
            chosen[cell] = point
            energy += more
        elif bound is None:
            # All steps before this one were taken, and the rest of the budget pays for a part.
            bound = math.fsum(each.ms for each in chosen) - slope * (limit - energy)
            price = slope
    objective = math.fsum(point.ms for point in chosen)
    return chosen, objective if bound is None else bound, price


_Path = tuple[_Point, "_Path"] | None
"""Points of the cells that were decided, last first."""


class _Partial(NamedTuple):
    """Choice for the first cells of a search."""

    energy: float
    ms: float
    excess: float
    """Amount by which time + price · energy exceeds its minimum over the same cells."""
    path: _Path


def _searched(
    frontiers: Sequence[Sequence[_Point]],
    limit: float,
    known: list[_Point],
    bound: float,
    price: float,
) -> tuple[list[_Point], bool]:
    """Search for a choice that is faster than a known one.

    A choice takes at least the bound plus its excess, so partial choices whose excess uses up the
    gap are dropped.

    Returns:
        The better choice, or else the known one; and whether it is certainly optimal.
    """
    best_ms = math.fsum(point.ms for point in known)
    room = best_ms - bound
    options = []
    for cell, frontier in enumerate(frontiers):
        prices = [point.ms + price * point.energy for point in frontier]
        excesses = [each - min(prices) for each in prices]
        kept = [pair for pair in zip(excesses, frontier, strict=True) if pair[0] < room]
        options.append((len(kept), cell, kept))
    options.sort(key=itemgetter(0, 1))  # decided cells first, so that they multiply nothing
    least_left = math.fsum(kept[0][1].energy for _, _, kept in options)
    partials, is_complete = [_Partial(0.0, 0.0, 0.0, None)], True
    for _, _, kept in options:
        least_left -= kept[0][1].energy
        longer = [
            _Partial(
                partial.energy + point.energy,
                partial.ms + point.ms,
                partial.excess + excess,
                (point, partial.path),
            )
            for partial in partials
            for excess, point in kept
            if partial.excess + excess < room
            and partial.energy + point.energy + least_left <= limit
        ]
        partials = _undominated(longer)
        if len(partials) > WIDTH:
            partials, is_complete = nsmallest(WIDTH, partials, key=attrgetter("excess")), False
    fastest = min(partials, key=attrgetter("ms"), default=None)
    if fastest is None or fastest.ms >= best_ms:
        return known, is_complete
    chosen = list(known)
    for (_, cell, _), point in zip(reversed(options), _points(fastest.path), strict=True):
        chosen[cell] = point
    return chosen, is_complete


def _points(path: _Path) -> Iterator[_Point]:
    """Yield the points of a path, last first."""
    while path is not None:
        point, path = path
        yield point


def _undominated(partials: Iterable[_Partial]) -> list[_Partial]:
    """Drop each choice that another one beats in time and energy."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=itemgetter(0, 1)):
        if not kept or partial.ms < kept[-1].ms:
            kept.append(partial)
    return kept
