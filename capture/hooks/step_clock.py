"""Numbers denoising steps, which may take several forward passes, such as one for each prompt.

A pipeline's step ends when it calls its scheduler's `step`. Without a known pipeline, or before the
first such call, forward passes with the same time step belong to one step. Time steps on a GPU are
compared by their place in memory, because reading them would stall the model; if this does not tell
and no scheduler is known, each forward pass is a step. Steps begin at 0 again when a pipeline sets
the time steps of its scheduler, as it does in each run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from capture.hooks.modes import outside_of_modes


class StepCounter:
    """Number of the current denoising step."""

    def __init__(self) -> None:
        self._step, self._ticks = -1, 0
        self._earlier: tuple[Any, ...] = ()

    def advance(self, time_step: Any, ticks: int | None) -> int:
        """Return the step of the next forward pass, from 0.

        Args:
            time_step: time step that the model received, of any type.
            ticks: number of calls of the scheduler so far; None if no scheduler is known.
        """
        is_same = None
        identity = self._earlier
        with contextlib.suppress(Exception):  # such as tensors without memory
            identity = _identity(time_step)
            is_same = _is_same(self._earlier, identity)
        if ticks:
            is_new = ticks != self._ticks
        else:
            is_new = is_same is False or (is_same is None and ticks is None)
        self._earlier, self._ticks = identity, ticks or 0
        self._step += is_new or self._step < 0
        return self._step


def _identity(time_step: Any) -> tuple[Any, ...]:
    """Return a time step, with its value if it is in host memory, else with its place."""
    if not isinstance(time_step, Tensor):
        return (time_step,)
    if time_step.device.type == "cpu":
        with outside_of_modes():
            return time_step.device.type, time_step.detach().clone()
    version = None if time_step.is_inference() else time_step._version
    # The tensor is held, so that no other time step takes its place in memory.
    return time_step.data_ptr() or None, time_step.shape, time_step.stride(), version, time_step


def _is_same(earlier: tuple[Any, ...], later: tuple[Any, ...]) -> bool | None:
    """Return whether two time steps are equal; None if their values are unknown."""
    if len(earlier) != len(later):
        return False
    if len(later) == 1:
        return bool(earlier[0] == later[0])
    if len(later) == 2:
        with outside_of_modes():
            return torch.equal(earlier[1], later[1])
    if later[0] is None:
        return None
    if earlier[:-1] == later[:-1]:
        return True
    storages = (each[-1].untyped_storage().data_ptr() for each in (earlier, later))
    return False if len({*storages}) == 1 else None


class SchedulerCalls:
    """Calls of a pipeline's schedulers, in any thread, because replicas run in their own threads.

    Args:
        kinds: classes of the schedulers (`scheduler_types`).
    """

    def __init__(self, kinds: Collection[Any]) -> None:
        self._kinds = kinds
        self._ticks = 0 if kinds else None
        self._steps = StepCounter()

    def denoising_step(self, own: StepCounter, time_step: Any) -> int:
        """Return the step of a forward pass; `own` counts the steps if no scheduler is known.

        All modules of a pipeline share the steps of its schedulers.
        """
        return (own if self._ticks is None else self._steps).advance(time_step, self._ticks)

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count the calls until the exit.

        The class is changed and not the scheduler, because pipelines copy schedulers.
        """
        with contextlib.ExitStack() as stack:
            for kind in self._kinds:
                stack.enter_context(_preceded(kind, "step", self._tick))
                stack.enter_context(_preceded(kind, "set_timesteps", self._begin))
            yield

    def _tick(self) -> None:
        self._ticks = (self._ticks or 0) + 1

    def _begin(self) -> None:
        self._ticks, self._steps = 0, StepCounter()


@contextlib.contextmanager
def _preceded(kind: Any, name: str, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` before each call of a class's method, unless the program replaces the method."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def preceded(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    own = vars(kind).get(name)  # None if inherited
    setattr(kind, name, preceded)
    try:
        yield
    finally:
        if vars(kind).get(name) is preceded:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def scheduler_types(watched: Any) -> set[Any]:
    """Return the classes of the schedulers that a pipeline calls; empty for any other object."""
    with contextlib.suppress(Exception):  # the model's own classes may raise
        names = inspect.unwrap(type(watched).__call__).__code__.co_names
        parts = watched.components
        if isinstance(parts, Mapping) and "step" in names:
            return {type(part) for part in parts.values() if hasattr(part, "set_timesteps")}
    return set()
