"""Results of using one kernel at every layer, as far as its errors and times are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay.plan.cells import Cost, cells_of, cost_of, decided_saving
from replay.plan.plan import Budget
from replay.rows.row import Row


@dataclass(frozen=True)
class Uniform:
    """Results of using one kernel at every layer; counts are numbers of layers, in each phase."""

    kernel: str
    saved_ms: float | None
    """Predicted time saved per run, without undecided layers; None if the kernel failed or is wrong
    on a call."""
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
    overwrites: int = 0
    """Number of layers that fit the budget but are excluded from `inside`, because later calls read
    inputs that the kernel changes."""
    undecided: int = 0
    """Number of layers where the times show no relevant difference from the baseline."""


def uniform(
    rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
) -> list[Uniform]:
    """Evaluate the use of each kernel at every layer, with the baseline first.

    Kernels that run at no layer are left out.

    Raises:
        PlanError: the rows come from several models, or the baseline has no rows.
        CensusError: the census is empty.
    """
    kernels: dict[str, list[Cost]] = {}
    undecided: Counter[str] = Counter()
    for cell in cells_of(rows, census, baseline):
        for kernel in cell.kernels:
            cost = cost_of(cell, kernel, budget)
            cost = cost._replace(saved_ms=decided_saving(cell, cost))
            kernels.setdefault(kernel, []).append(cost)
            is_timed = cost.choice.time_ms is not None and cost.status != "unsupported"
            undecided[kernel] += kernel != cell.baseline and is_timed and cost.saved_ms == 0
    return [
        _uniform(kernel, costs, undecided[kernel], budget)
        for kernel, costs in kernels.items()
        if {cost.status for cost in costs} - {None, "unavailable", "unsupported"}
    ]


def _uniform(kernel: str, costs: Sequence[Cost], undecided: int, budget: Budget) -> Uniform:
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
        undecided=undecided,
        falls_back=falls_back,
        failed=len(costs) - judged - falls_back - not_captured,
        not_captured=not_captured,
        worst_module=worst.module if worst else "",
        worst_phase=worst.phase if worst else "",
        worst_figure=figure,
    )
