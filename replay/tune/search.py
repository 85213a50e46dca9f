"""Search for the fastest plans whose output stays within a quality budget.

A planner turns a limit on the foretold error of the output, or else on the errors of single calls,
into a plan: the larger the limit, the faster the plan and, on the whole, the worse the output. The
limit is bisected. The output of every candidate is judged in the real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from replay.plan.plan import Plan
from replay.tune.quality import Quality

MOST_TRIALS = 12
"""Maximum number of plans that a search judges."""

CLOSE = 1.02
"""Ratio of two limits between which no other plan is sought."""

Planner = Callable[[float], Plan]
"""Function that returns the fastest plan within a limit on the error of attention."""

Key = tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True)
class Trial:
    """Plan that ran in the model, and the quality of its output."""

    limit: float
    """Limit on the error of attention that the plan was made for."""
    plan: Plan
    quality: Quality | None
    """Quality of the output; None for a plan that failed in the model."""
    reason: str = ""
    """Reason why the plan failed; empty if it did not."""

    @property
    def holds(self) -> bool:
        """Return True if the output is within the budget."""
        return self.quality is not None and self.quality.holds


def key_of(plan: Plan) -> Key:
    """Return the kernels of a plan, so that plans that run alike are judged once."""
    return tuple(
        (each.module, each.phase, f"{each.kv_lens}, {each.steps}", each.kernel)
        for each in plan.choices
    )


def search(
    planner: Planner,
    judge: Callable[[float, Plan], Trial],
    low: float,
    high: float,
    is_in_time: Callable[[], bool] = lambda: True,
) -> Iterator[Trial]:
    """Yield the trials of plans, each made for another limit from `low` to `high`.

    The first trial is of the plan for the largest limit. If it holds, it is the only one.

    Args:
        judge: function that runs the model with a plan that was made for a limit.
        is_in_time: function that returns False when no more plans should be judged.
    """
    judged: dict[Key, Trial] = {}
    within, beyond = low, high
    for limit in (high, low):
        plan = planner(limit)
        if plan.kernels and key_of(plan) not in judged:
            trial = judged[key_of(plan)] = judge(limit, plan)
            yield trial
        # Without a plan, the model's own attention runs, which is within every budget.
        holds = judged[key_of(plan)].holds if plan.kernels else True
        if holds == (limit == high):
            return
    while beyond / within > CLOSE and len(judged) < MOST_TRIALS and is_in_time():
        if key_of(planner(within)) == key_of(planner(beyond)):
            return
        limit = math.sqrt(within * beyond)
        plan = planner(limit)
        if plan.kernels and key_of(plan) not in judged:
            trial = judged[key_of(plan)] = judge(limit, plan)
            yield trial
        if not plan.kernels or judged[key_of(plan)].holds:
            within = limit
        else:
            beyond = limit


def careful(
    planner: Planner, judge: Callable[[float, Plan], Trial], limit: float, low: float
) -> Iterator[Trial]:
    """Yield trials of ever more careful plans, made for half the limit each time, until `low`."""
    seen = {key_of(planner(limit))}
    while limit > low:
        limit = max(limit / 2, low)
        plan = planner(limit)
        if plan.kernels and key_of(plan) not in seen:
            seen.add(key_of(plan))
            yield judge(limit, plan)
