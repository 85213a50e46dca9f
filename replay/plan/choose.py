"""Maker of plans: the fastest kernel at every cell of a model, within an error budget.

A cell is a module in a phase, for a range of key lengths (`replay.plan.cells`). The budget limits
the error of each call. A plan may also have a limit for the sum of the errors of a run's calls;
then the cells are also divided into ranges of denoising steps, and chosen together
(`replay.plan.knapsack`). Neighbouring cells with the same kernel become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from replay.plan.cells import (
    Cell,
    Cost,
    by_length,
    by_step,
    cells_of,
    cost_of,
    decided_saving,
    is_undecided,
)
from replay.plan.key_lengths import KeyLengths
from replay.plan.knapsack import Option, solve
from replay.plan.plan import Budget, LayerChoice, Plan, PlanError, TotalError
from replay.plan.plan_device import measured_on
from replay.plan.step_ranges import StepRange
from replay.rows.row import Row


class MoreKernels(Protocol):
    """Kernels for single cells whose times and errors do not come from rows."""

    def kernels(self, cell: Cell) -> Sequence[str]:
        """Return the names of the kernels for a cell."""

    def cost(self, cell: Cell, kernel: str, budget: Budget) -> Cost | None:
        """Return the time and error of a kernel at a cell; None if they are those of rows."""

    def scale(self, cell: Cell) -> float:
        """Return the factor of the error energies that come from rows."""


def choose(
    rows: Iterable[Row],
    census: Mapping[str, Any],
    budget: Budget,
    baseline: str,
    exclusive: Collection[str] = (),
    total_error: float | None = None,
) -> Plan:
    """Choose, for every cell of a census, the fastest kernel within the budget.

    The baseline of a cell is the kernel that the model itself ran there, if it was timed. A
    kernel's error at a cell is its worst error over the cell's calls. A kernel that was not ok
    on a call, or that overwrites inputs of later calls (`Row.overwrites`), is never chosen for that
    cell. If kernels tie with the fastest, the baseline is preferred, then the first in the rows. A
    cell without replayed calls, or with no kernel within the budget, keeps the baseline. At other
    cells, the baseline is chosen only if it is within the budget. A plan runs in one process, so
    kernels replayed in other environments are not chosen.

    With a total error, the kernels of all cells are chosen together, so that the time of all calls
    is least. Kernels that tie with the baseline are not chosen then. A plan within the total error
    may not exist; then every cell keeps the baseline.

    Args:
        rows: rows from a replay of one model's recording, with their samples.
        census: census of the model, in the form of `capture.hooks.census.Census.to_json`.
        baseline: the kernel of plain SDPA, which the model itself uses where it did not choose
            another (`CallFacts.pinned`).
        exclusive: kernels that cannot share a process (`Kernel.own_process`). The plan uses only
            the one that saves most.
        total_error: the largest sum of `replay.plan.cells.error_energy` over the calls of a run;
            None for no limit. Cells without a kernel within the budget are not in the sum.

    Returns:
        The plan. Its `left_out` names the kernels that were not chosen only because they overwrite
        inputs of later calls, or because they cannot share a process.

    Raises:
        PlanError: the rows come from several models or types of GPU, the baseline has no rows, or
            the total error is not a number of at least 0.
        CensusError: the census is empty.
    """
    if total_error is not None:
        return WithinTotal(rows, census, budget, baseline, exclusive).plan(total_error)
    costs = _Costs.of(rows, census, budget, baseline)
    return costs.plan(lambda allowed: (list(map(_best, costs.cells, allowed)), None), exclusive)


@dataclass(frozen=True)
class _Costs:
    """Cells of a model, and the costs of the kernels at each cell, with the baseline's first."""

    budget: Budget
    baseline: str
    cells: list[Cell]
    costs: list[list[Cost]]
    left_out: dict[str, str]
    device: str
    exact: list[str]
    """Names of the exact kernels."""
    more: MoreKernels | None = None

    @classmethod
    def of(
        cls, rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
    ) -> _Costs:
        rows = list(rows)
        cells = [part for cell in cells_of(rows, census, baseline) for part in by_length(cell)]
        costs = [[cost_of(cell, kernel, budget) for kernel in cell.kernels] for cell in cells]
        left_out = _left_out(map(_best, cells, costs))
        exact = dict.fromkeys(row.kernel for row in rows if row.accuracy_class == "exact")
        return cls(budget, baseline, cells, costs, left_out, _device(rows), [*exact])

    def plan(
        self,
        best: Callable[[list[list[Cost]]], tuple[list[Cost], TotalError | None]],
        exclusive: Collection[str],
    ) -> Plan:
        """Return a plan whose kernels can share a process.

        Args:
            best: function that chooses from the allowed costs of each cell.
        """

        def without(excluded: Collection[str]) -> Plan:
            def is_allowed(cost: Cost) -> bool:
                return cost.choice.kernel not in excluded and not cost.overwrites

            chosen, spent = best(
                [[own, *filter(is_allowed, others)] for own, *others in self.costs]
            )
            picked = [(cell, cost.choice) for cell, cost in zip(self.cells, chosen, strict=True)]
            return self.plan_of(picked, spent)

        # Exclusive kernels matter only if the best plan uses several of them.
        unrestricted = without(())
        conflicting = [kernel for kernel in unrestricted.kernels if kernel in exclusive]
        if len(conflicting) < 2:
            return unrestricted
        plans = {kernel: without({*exclusive} - {kernel, self.baseline}) for kernel in conflicting}
        chosen = max(conflicting, key=lambda kernel: plans[kernel].saved_ms)
        reason = f"{chosen} saves more, and the two cannot share a process"
        others = {each: reason for each in conflicting if each != chosen}
        return replace(plans[chosen], left_out=self.left_out | others)

    def plan_of(self, picked: Iterable[Picked], spent: TotalError | None) -> Plan:
        """Return the plan of these choices."""
        return Plan(
            self.cells[0].model,
            self.cells[0].weights,
            self.budget,
            self.baseline,
            [self._with_others(*each) for each in _joined(picked, self.cost)],
            self.left_out,
            self.device,
            total_error=spent,
        )

    def _with_others(self, cell: Cell, choice: LayerChoice) -> LayerChoice:
        """Return a choice with the times of the other exact kernels that may run at its cell."""
        saved = {}
        for kernel in self.exact:
            if kernel not in cell.kernels or kernel in (cell.baseline, choice.kernel):
                continue
            cost = self.cost(cell, kernel)
            saved_ms = decided_saving(cell, cost)
            may_run = cost.choice.inside if choice.covered else _runs(cell, kernel)
            if may_run and not cost.overwrites and saved_ms is not None:
                saved[kernel] = saved_ms
        return replace(choice, others=saved)

    def cost(self, cell: Cell, kernel: str) -> Cost:
        """Return the time and error of a kernel at a cell."""
        if self.more is None:
            return cost_of(cell, kernel, self.budget)
        found = self.more.cost(cell, kernel, self.budget)
        if found is not None:
            return found
        cost = cost_of(cell, kernel, self.budget)
        return cost._replace(energy=cost.energy * self.more.scale(cell))


EnergyAt = Callable[[Cell, str], float]
"""Function that returns the error energy of a kernel at a cell; NaN if it is not known."""


class WithinTotal:
    """Maker of plans within a total error; the other arguments are those of `choose`.

    Args:
        energy_at: error energies to add instead of `replay.plan.cells.error_energy`. They must be 0
            for the model's own attention.
        more: kernels to choose from besides those of the rows.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        census: Mapping[str, Any],
        budget: Budget,
        baseline: str,
        exclusive: Collection[str] = (),
        energy_at: EnergyAt | None = None,
        more: MoreKernels | None = None,
    ) -> None:
        whole = replace(_Costs.of(rows, census, budget, baseline), more=more)
        cells, costs = _split_by_step(whole)
        if energy_at is not None:
            costs = [
                [cost._replace(energy=energy_at(cell, cost.choice.kernel)) for cost in each]
                for cell, each in zip(cells, costs, strict=True)
            ]
        self._costs = replace(whole, cells=cells, costs=costs)
        self._exclusive = exclusive

    def plan(self, limit: float) -> Plan:
        """Return the plan with the least time within a limit of the total error.

        Raises:
            PlanError: the limit is not a number of at least 0.
        """
        if not 0 <= limit < math.inf:
            raise PlanError(f"invalid total error {limit} (must be finite and at least 0)")
        return self._costs.plan(lambda allowed: _within_total(allowed, limit), self._exclusive)

    def plan_with(self, kernels: Mapping[int, str]) -> Plan:
        """Return the plan with kernels at some cells, by index; others have the model's own."""
        picked = [
            (cell, self._costs.cost(cell, kernels.get(at, cell.baseline)).choice)
            for at, cell in enumerate(self.cells)
        ]
        return self._costs.plan_of(picked, None)

    @property
    def cells(self) -> list[Cell]:
        return self._costs.cells

    @property
    def own_error(self) -> float:
        """Total error of the model's own attention, as far as its errors are known."""
        return math.fsum(_known(own.energy) for own, *_ in self._costs.costs)


def _known(energy: float) -> float:
    return energy if math.isfinite(energy) else 0.0


def _split_by_step(whole: _Costs) -> tuple[list[Cell], list[list[Cost]]]:
    """Split cells by step, and return the costs at each, with the baseline's first.

    Kernels that tie with the baseline are left out where the baseline is within the budget. Times
    are pooled over the steps, so these kernels are the same at all steps.
    """
    parts, costs = [], []
    for cell in whole.cells:
        baseline, *others = cell.kernels
        decided = [kernel for kernel in others if not is_undecided(cell, kernel, baseline)]
        for part in by_step(cell):
            own = whole.cost(part, baseline)
            kernels = decided if own.choice.inside else others
            more = whole.more.kernels(part) if whole.more is not None else ()
            parts.append(part)
            costs.append([own, *(whole.cost(part, kernel) for kernel in (*kernels, *more))])
    return parts, costs


def _within_total(costs: Sequence[Sequence[Cost]], limit: float) -> tuple[list[Cost], TotalError]:
    """Choose from the costs of each cell, which start with the baseline's cost."""
    best = [own for own, *_ in costs]
    options = {at: [_option(cost) for cost in each] for at, each in enumerate(costs)}
    open_cells = [
        at for at, each in options.items() if any(math.isfinite(one.energy) for one in each)
    ]
    found = solve([options[at] for at in open_cells], limit)
    for at, index in zip(open_cells, found.choices, strict=True):
        best[at] = costs[at][index]
    if not found.is_feasible:
        return best, TotalError(limit, None, None)
    return best, TotalError(limit, found.energy, found.gap)


def _option(cost: Cost) -> Option:
    """Return the option of a kernel at a cell, which has no energy if it must not be chosen."""
    if cost.total_ms is None or not cost.choice.inside:
        return Option(cost.choice.kernel, math.inf, math.nan)
    return Option(cost.choice.kernel, cost.total_ms, cost.energy)


Picked = tuple[Cell, LayerChoice]
CostOf = Callable[[Cell, str], Cost]
"""Function that returns the time and error of a kernel at a cell."""


def _joined(picked: Iterable[Picked], cost: CostOf) -> list[Picked]:
    """Join neighbouring cells with the same kernel: ranges of steps, then of key lengths."""
    by_lengths: list[Picked] = []
    for _, steps in groupby(picked, lambda each: (*_layer(each[1]), each[1].kv_lens)):
        runs = [list(run) for _, run in groupby(steps, lambda each: _alike(each[1]))]
        by_lengths += [_merged(run, cost, is_whole=len(runs) == 1) for run in runs]
    runs = [
        list(run)
        for _, run in groupby(
            by_lengths, lambda each: (*_layer(each[1]), each[1].steps, _alike(each[1]))
        )
    ]
    return [_merged(run, cost, is_whole=run[0][1].steps is None) for run in runs]


def _layer(choice: LayerChoice) -> tuple[str, str]:
    return choice.module, choice.phase


def _alike(choice: LayerChoice) -> tuple[str, bool]:
    return choice.kernel, choice.inside


def _merged(run: Sequence[Picked], cost: CostOf, *, is_whole: bool) -> Picked:
    """Merge neighbouring cells into one.

    Args:
        is_whole: True if the cells contain all steps of the layer.
    """
    if len(run) == 1 and not (is_whole and run[0][0].steps):
        return run[0]
    cells = [cell for cell, _ in run]
    first, last = cells[0].steps, cells[-1].steps
    cell = replace(
        cells[0],
        counted=[counted for each in cells for counted in each.counted],
        captured={name: call for each in cells for name, call in each.captured.items()},
        kv_lens=KeyLengths(
            min(each.lengths.low for each in cells), max(each.lengths.high for each in cells)
        ),
        steps=None if is_whole or not (first and last) else StepRange(first.first, last.last),
    )
    return cell, cost(cell, run[0][1].kernel).choice


def _device(rows: Iterable[Row]) -> str:
    """Return the type of device that the rows were measured on."""
    timed = (measured_on(row.machine) for row in rows if row.time_ms is not None)
    devices = sorted({device for device in timed if device})
    if len(devices) > 1:
        raise PlanError(
            f"a plan is for one type of GPU, but the rows were measured on {', '.join(devices)}: "
            "make one from the rows of each"
        )
    return devices[0] if devices else ""


def _best(cell: Cell, costs: Sequence[Cost]) -> Cost:
    """Choose from the kernels' costs at a cell, which start with the baseline's cost."""
    timed = [cost for cost in costs if cost.choice.inside and cost.choice.time_ms is not None]
    if not timed:
        return costs[0]
    fastest = min(timed, key=lambda cost: cost.choice.time_ms or 0.0)
    return next(
        cost
        for cost in timed
        if cost is fastest or is_undecided(cell, fastest.choice.kernel, cost.choice.kernel)
    )


def _runs(cell: Cell, kernel: str) -> bool:
    """Return True if a kernel may run the replayed calls that represent a cell's calls."""
    calls = {name for counted in cell.counted for name in counted.shares}
    rows = [row for name in calls if (row := cell.row(name, kernel)) is not None]
    return all(row.status == "ok" and not row.overwrites for row in rows)


def _left_out(costs: Iterable[Cost]) -> dict[str, str]:
    """Return why kernels that are the fastest but overwrite inputs are not chosen."""
    phases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for cost in costs:
        if cost.overwrites:
            choice = cost.choice
            phases.setdefault((choice.kernel, cost.overwrites), {})[choice.phase] = None
    reasons: dict[str, list[str]] = {}
    for (kernel, names), where in phases.items():
        changes = f"changes {' and '.join(names)} in place, which later calls read again"
        reasons.setdefault(kernel, []).append(f"in {' and '.join(where)} it {changes}")
    return {kernel: "; ".join(each) for kernel, each in reasons.items()}
