"""Applies a plan to a pipeline until it is removed: `applied = apply("plan.json", pipe)`."""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from replay.patch.call_counts import Swap
from replay.patch.use_kernel import use_plan
from replay.plan.plan import Plan


class Applied:
    """A plan that is applied to a pipeline. As a context manager, it removes the plan on exit."""

    def __init__(self, plan: Plan | None, swapped: contextlib.AbstractContextManager[Swap]) -> None:
        self._stack = contextlib.ExitStack()
        self.plan = plan
        """The plan; None if `tuned` found none, so that the pipeline has its own attention."""
        self.swap = self._stack.enter_context(swapped)
        """Live counts of hits, fallbacks, and calls that the plan was not made for."""
        # This also keeps the plan applied if the program drops this object.
        atexit.register(self.remove)

    def remove(self) -> None:
        """Give the pipeline its own attention again; do nothing if the plan was removed before.

        Warns:
            UserWarning: no kernel handled a call.
        """
        atexit.unregister(self.remove)
        self._stack.close()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        if self.plan is None:
            return "no plan: the model keeps its own attention"
        return str(self.swap)


def apply(
    plan: str | Path | Plan,
    module: Any,
    *,
    any_device: bool = False,
    trust_code: bool = False,
) -> Applied:
    """Apply a plan as `use_plan` does, until `remove` is called on the result.

    Only one plan can be applied in a process. A recording, `use_kernel` and `use_plan` need its
    removal first.

    Args:
        plan: a file written by `replay tune` or `replay plan`, or a `Plan`.
        module: a diffusers pipeline, a `torch.nn.Module`, or a dict of name → module.
        any_device: use the plan on a type of GPU other than the one it was made on, or on a CPU.
        trust_code: allow kernels that the plan names as `file.py:function`, whose code runs.

    Returns:
        The applied plan, with its live counts in `swap`.

    Raises:
        PlanError, PlanMismatch, KernelNameError: the plan cannot be used (see `use_plan`).
        RuntimeError: a plan is applied already, or a recording or swap is active.

    Example:
        >>> applied = apply("plan.json", pipe)
        >>> pipe("a panda playing guitar")
        >>> applied.remove()
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    return Applied(plan, use_plan(plan, module, any_device=any_device, trust_code=trust_code))
