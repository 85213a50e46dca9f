"""Numbers the denoising steps of a running model as a recording does (`capture.hooks.step_clock`).

The number is determined outside compiled code, around the outermost function of a denoiser, and
read when the operator in a graph runs. Graphs therefore do not depend on the step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from capture.hooks.phases import ModuleRole
from capture.hooks.step_clock import SchedulerCalls, StepCounter, scheduler_types
from replay.patch.wrapped_forward import compiled_wrappers, uncompiled, wrapped_outside
from replay.plan.plan import PlanError


class _Current(threading.local):
    def __init__(self) -> None:
        self.step: int | None = None


_current = _Current()


def current_step(*, on_gpu: bool) -> int:
    """Return the denoising step that the calling thread is in, from 0.

    Args:
        on_gpu: whether the call's tensors are on a CUDA device.

    Raises:
        PlanError: the step is unknown, or a CUDA graph is being captured.
    """
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise PlanError(
            "this plan chooses kernels by denoising step, and a CUDA graph repeats those of one "
            "step: capture the graph without the plan, or use a plan without ranges of steps"
        )
    step = _current.step
    if step is None:
        raise PlanError(
            "the denoising step of an attention call is unknown, because its denoiser was compiled "
            "after the plan was applied, or within another function: compile the denoiser itself, "
            "and do so before applying the plan"
        )
    return step


@contextlib.contextmanager
def numbered_steps(denoisers: Mapping[nn.Module, ModuleRole]) -> Iterator[None]:
    """Number the steps of denoisers, compiled or not, until the exit.

    If a live pipeline contains a denoiser, the steps are those of its scheduler and begin at 0 in
    each of its runs. Without a pipeline, they begin at 0 on entry.
    """
    compiled = compiled_wrappers(denoisers)
    schedulers, running = SchedulerCalls(_schedulers(denoisers)), threading.Lock()
    with contextlib.ExitStack() as stack:
        for module, role in denoisers.items():
            step_in = functools.partial(schedulers.denoising_step, StepCounter())
            numbering = functools.partial(_numbering, role, step_in, running)
            stack.enter_context(wrapped_outside(module, numbering, compiled.get(module, ())))
        stack.enter_context(schedulers.count())
        yield


def _numbering(
    role: ModuleRole,
    step_in: Callable[[Any], int],
    running: threading.Lock,
    forward: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def numbering(*args: Any, **kwargs: Any) -> Any:
        # Checked first, because the code below cannot be traced. An outer function may know it.
        if torch.compiler.is_compiling() or _current.step is not None:
            return forward(*args, **kwargs)
        time_step = role.time_step(args, kwargs)
        if time_step is None:
            return forward(*args, **kwargs)
        if not running.acquire(blocking=False):
            raise PlanError(
                "two threads run a denoiser at the same time, but this plan counts the denoising "
                "steps of one run: let one run end before the next, or use a plan without steps"
            )
        try:
            _current.step = step_in(time_step)
            return forward(*args, **kwargs)
        finally:
            _current.step = None
            running.release()

    return numbering


def _schedulers(denoisers: Mapping[nn.Module, ModuleRole]) -> set[Any]:
    """Return the schedulers' classes of the live pipelines that contain a denoiser."""
    schedulers: set[Any] = set()
    for each in gc.get_objects():
        if hasattr(type(each), "components") and (kinds := scheduler_types(each)):
            parts = [part for part in each.components.values() if isinstance(part, nn.Module)]
            if any(uncompiled(part) in denoisers for part in parts):
                schedulers |= kinds
    return schedulers
