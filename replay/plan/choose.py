"""Maker of plans: the fastest kernel at every cell of a model, within an error budget.

A cell is a module in a phase, for a range of key lengths (`replay.plan.cells`). The budget limits
the error of each call. A plan may also have a limit for the sum of the errors of a run's calls;
then the cells are also divided into ranges of denoising steps, and chosen together
(`replay.plan.knapsack`). Neighbouring cells with the same kernel become one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from replay.plan.cells import Cell, Cost, by_length, by_step, cells_of, cost_of, is_undecided
from replay.plan.key_lengths import KeyLengths
from replay.plan.knapsack import Option, solve
from replay.plan.plan import Budget, LayerChoice, Plan, PlanError, TotalError
from replay.plan.plan_device import measured_on
from replay.plan.step_ranges import StepRange
from replay.rows.row import Row


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
    if total_error is not None and not 0 <= total_error < math.inf:
        raise PlanError(f"invalid total error {total_error} (must be finite and at least 0)")
    rows = list(rows)
    cells = [part for cell in cells_of(rows, census, baseline) for part in by_length(cell)]
    costs = [[cost_of(cell, kernel, budget) for kernel in cell.kernels] for cell in cells]
    left_out = _left_out([_best(*each) for each in zip(cells, costs, strict=True)])
    model, weights, device = cells[0].model, cells[0].weights, _device(rows)
    if total_error is not None:
        cells, costs = _split_by_step(cells, budget)

    def plan(excluded: Collection[str]) -> Plan:
        def is_allowed(cost: Cost) -> bool:
            return cost.choice.kernel not in excluded and not cost.overwrites

        allowed = [[own, *filter(is_allowed, others)] for own, *others in costs]
        spent = None
        if total_error is None:
            best = [_best(cell, each) for cell, each in zip(cells, allowed, strict=True)]
        else:
            best, spent = _within_total(allowed, total_error)
        picked = [(cell, cost.choice) for cell, cost in zip(cells, best, strict=True)]
        choices = _joined(picked, budget)
        return Plan(model, weights, budget, baseline, choices, left_out, device, total_error=spent)

    # Exclusive kernels matter only if the best plan uses several of them.
    unrestricted = plan(())
    conflicting = [kernel for kernel in unrestricted.kernels if kernel in exclusive]
    if len(conflicting) < 2:
        return unrestricted
    plans = {kernel: plan(set(exclusive) - {kernel, baseline}) for kernel in conflicting}
    chosen = max(conflicting, key=lambda kernel: plans[kernel].saved_ms)
    reason = f"{chosen} saves more, and the two cannot share a process"
    others = {each: reason for each in conflicting if each != chosen}
    return replace(plans[chosen], left_out=left_out | others)


def _split_by_step(cells: Iterable[Cell], budget: Budget) -> tuple[list[Cell], list[list[Cost]]]:
    """Split cells by step, and return the costs at each, with the baseline's first.

    Kernels that tie with the baseline are left out where the baseline is within the budget. Times
    are pooled over the steps, so these kernels are the same at all steps.
    """
    parts, costs = [], []
    for cell in cells:
        baseline, *others = cell.kernels
        decided = [kernel for kernel in others if not is_undecided(cell, kernel, baseline)]
        for part in by_step(cell):
            own = cost_of(part, baseline, budget)
            kernels = decided if own.choice.inside else others
            parts.append(part)
            costs.append([own, *(cost_of(part, kernel, budget) for kernel in kernels)])
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


@dataclass(frozen=True)
class Uniform:
    """Results of using one kernel at every layer; all counts are numbers of layers."""

    kernel: str
    saved_ms: float | None
    """Predicted time saved per run; None if the kernel failed or is wrong on a call."""
    inside: int
    outside: int
    """Layers where the kernel is wrong or outside the budget."""
    falls_back: int
    """Layers where the kernel is not supported, so that the model's own attention runs."""
    failed: int
    """Layers where the kernel failed, such as by a crash or for lack of memory."""
    not_captured: int
    """Layers without a replayed call, where the kernel's error is unknown."""
    worst_module: str
    """Layer with the worst value of the budget's metric; empty if no output was compared."""
    worst_phase: str
    worst_figure: float | None
    reason: str
    """Reason from the first layer where the kernel failed, is wrong or falls back."""
    overwrites: int = 0
    """Number of layers that fit the budget but are excluded from `inside`, because later calls read
    inputs that the kernel changes."""


def uniform(
    rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
) -> list[Uniform]:
    """Evaluate the use of each kernel at every layer, with the baseline first.

    Kernels that are unavailable at every layer are left out.

    Raises:
        PlanError: the rows come from several models, or the baseline has no rows.
        CensusError: the census is empty.
    """
    kernels: dict[str, list[Cost]] = {}
    for cell in cells_of(rows, census, baseline):
        for kernel in cell.kernels:
            kernels.setdefault(kernel, []).append(cost_of(cell, kernel, budget))
    return [
        _uniform(kernel, costs, budget)
        for kernel, costs in kernels.items()
        if {cost.status for cost in costs} - {None} != {"unavailable"}
    ]


def _uniform(kernel: str, costs: Sequence[Cost], budget: Budget) -> Uniform:
    choices = [cost.choice for cost in costs]
    compared = [(each, each.worst.of(budget.metric)) for each in choices if each.worst is not None]
    worst, figure = max(compared, key=lambda each: budget.badness(each[1]), default=(None, None))
    saved = [cost.saved_ms for cost in costs]
    statuses = [cost.status for cost in costs]
    inside = sum(cost.choice.inside and not cost.overwrites for cost in costs)
    overwrites = sum(cost.choice.inside and bool(cost.overwrites) for cost in costs)
    judged = statuses.count("ok") + statuses.count("inaccurate")
    falls_back, not_captured = statuses.count("unsupported"), statuses.count(None)
    return Uniform(
        kernel=kernel,
        saved_ms=None if None in saved else sum(each for each in saved if each is not None),
        inside=inside,
        outside=judged - inside - overwrites,
        overwrites=overwrites,
        falls_back=falls_back,
        failed=len(costs) - judged - falls_back - not_captured,
        not_captured=not_captured,
        worst_module=worst.module if worst else "",
        worst_phase=worst.phase if worst else "",
        worst_figure=figure,
        reason=next((cost.reason for cost in costs if cost.reason), ""),
    )


Picked = tuple[Cell, LayerChoice]


def _joined(picked: Iterable[Picked], budget: Budget) -> list[LayerChoice]:
    """Join neighbouring cells with the same kernel: ranges of steps, then of key lengths."""
    by_lengths: list[Picked] = []
    for _, steps in groupby(picked, lambda each: (*_layer(each[1]), each[1].kv_lens)):
        runs = [list(run) for _, run in groupby(steps, lambda each: _alike(each[1]))]
        by_lengths += [_merged(run, budget, is_whole=len(runs) == 1) for run in runs]
    runs = [
        list(run)
        for _, run in groupby(
            by_lengths, lambda each: (*_layer(each[1]), each[1].steps, _alike(each[1]))
        )
    ]
    return [_merged(run, budget, is_whole=run[0][1].steps is None)[1] for run in runs]


def _layer(choice: LayerChoice) -> tuple[str, str]:
    return choice.module, choice.phase


def _alike(choice: LayerChoice) -> tuple[str, bool]:
    return choice.kernel, choice.inside


def _merged(run: Sequence[Picked], budget: Budget, *, is_whole: bool) -> Picked:
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
    return cell, cost_of(cell, run[0][1].kernel, budget).choice


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
