"""Function `plan`, which chooses the fastest kernel within a budget for each layer of a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from replay.api.recorded_models import one_capture
from replay.api.replay_calls import call_choice, replay

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from capture.storage.dataset import Dataset
    from replay.plan.plan import Budget, Plan
    from replay.plan.uniform import Uniform
    from replay.rows.row import Row

BUDGET = "cosine=0.998"
"""Default budget of a plan."""


class Choice(NamedTuple):
    """Plan, with the results of the kernels considered."""

    plan: Plan
    uniform: list[Uniform]
    """Results of using each kernel at every layer; the baseline comes first."""
    shortfall: str
    """Sentence about attention that the recording missed, or that was not timed as the model ran
    it; empty if there is none."""


def plan(
    dataset: str | os.PathLike[str] | Dataset,
    rows: Sequence[Row] | None = None,
    *,
    budget: str | Budget = BUDGET,
    total_error: float | None = None,
    **options: Any,
) -> Plan:
    """Choose the kernel to use at each layer of a recorded model.

    Times depend on how a model calls its kernels, so rows are measured as in a model: behind the
    model's own attention as baseline, with its masks, and on a GPU with untimed calls before each
    sample. If you pass your own rows, they should come from `replay(…, for_model=True)`.

    Args:
        dataset: all recorded calls of one model: a directory, an archive, an address or a dataset.
        rows: rows of these calls; None to measure the calls.
        budget: the largest error at any layer, such as "cosine=0.998".
        total_error: the largest sum over the calls of a run of the mean squared error / (mean
            |reference|)²; None for no limit. With a limit, kernels may differ between denoising
            steps, as far as several steps of a layer were recorded.
        **options: options of `replay`, for measuring.

    Returns:
        A plan, to `save` or to apply with `use_plan(plan)`.

    Raises:
        Error: the recording or the rows allow no plan.

    Example:
        >>> plan("captured_inputs", budget="cosine=0.998").save("plan.json")
    """
    with call_choice(dataset) as choice:
        opened = choice.opened(quiet=options.get("progress") is False)
    capture = one_capture(opened, str(dataset))
    if rows is None:
        rows = replay(opened or dataset, for_model=True, **options)
    return choose_plan(capture, rows, budget, total_error).plan


def choose_plan(
    capture: CaptureRecord,
    rows: Sequence[Row],
    budget: str | Budget = BUDGET,
    total_error: float | None = None,
) -> Choice:
    """Choose a plan from rows.

    Raises:
        Error: the rows allow no plan, or the budget or the total error is invalid.
    """
    from replay.end_to_end.census_check import shortfall
    from replay.end_to_end.model_process import OWN
    from replay.plan.call_matching import RowsByCall
    from replay.plan.choose import choose
    from replay.plan.plan import parse_budget
    from replay.plan.uniform import uniform

    limit = parse_budget(budget) if isinstance(budget, str) else budget
    chosen = choose(rows, capture.census, limit, OWN, exclusive_kernels(rows), total_error)
    sentences = [shortfall(capture)]
    if unknown := RowsByCall(rows, OWN).unknown_own:
        sentences.append(f"{unknown}; there, saved times are relative to {OWN}")
    each = uniform(rows, capture.census, limit, OWN)
    return Choice(chosen, each, "; ".join(filter(None, sentences)))


def exclusive_kernels(rows: Sequence[Row]) -> set[str]:
    """Return the names of kernels in the rows that cannot share a process with others."""
    from replay.kernels.registry import KernelNameError, find

    exclusive = set()
    for name in {row.kernel for row in rows if row.kernel}:
        # Rows from another machine may name a kernel that only it has.
        with contextlib.suppress(KernelNameError):
            if find(name).own_process:
                exclusive.add(name)
    return exclusive
