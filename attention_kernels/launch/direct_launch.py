"""Launches without Triton's launcher, which is a Python function around a C function.

Triton's function allocates scratch memory, which our kernels rarely need, and passes constants and
the kernel's arguments on. The constants are recorded once, so that later launches call the C
function itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

DirectLaunch = Callable[[int, Sequence[Any]], None]
"""Function of a stream and a kernel's arguments."""


def direct_launch(
    run: Any, grid: tuple[int, int, int], function: Any, metadata: Any
) -> DirectLaunch:
    """Return a function that launches a kernel as `run`, Triton's launcher, does without hooks.

    It calls `run` itself if the kernel needs scratch memory, or if this version of Triton builds
    launchers differently.
    """

    def through_triton(stream: int, arguments: Sequence[Any]) -> None:
        run(*grid, stream, function, metadata, None, None, None, *arguments)

    sizes = (getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile"))
    launch = getattr(run, "launch", None)
    if launch is None or any(size != 0 for size in sizes):
        return through_triton
    recorder = copy.copy(run)
    recorded: list[Any] = []
    recorder.launch = lambda *given: recorded.extend(given)
    stream, argument = object(), object()
    recorder(*grid, stream, function, metadata, None, None, None, argument)
    *before, last = recorded
    if before[:4] != [*grid, stream]:
        return through_triton
    constants = before[4:]

    def one_by_one(stream: int, arguments: Sequence[Any]) -> None:
        launch(*grid, stream, *constants, *arguments)

    def in_a_tuple(stream: int, arguments: Sequence[Any]) -> None:  # Triton 3.7
        launch(*grid, stream, *constants, arguments)

    if last is argument:
        return one_by_one
    return in_a_tuple if last == (argument,) else through_triton
