"""Function `kernels`, which lists the kernels and where they can run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay.api.choices import RunPlace, joined_names
from replay.api.chosen_device import check_name, device_of

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.workers.execution import Findings


def kernels(pattern: str | Sequence[str] | None = None) -> list[Kernel]:
    """Return the kernels that match names or globs.
    Args:
        pattern: names and globs, as a list or comma-separated. `FILE.py:FUNCTION` is a kernel of
            your own. By default all kernels except variants of others.

    Returns:
        Kernels with `name`, `about`, `accuracy_class` and `install`; `unavailable(device)` returns
        the reason why a kernel cannot run on a device, or None.

    Raises:
        KernelNameError: a name or glob matches no kernel.

    Example:
        >>> [kernel.name for kernel in kernels("torch-*")]
    """
    from replay.kernels.registry import select

    return select("all" if pattern is None else joined_names(pattern))[0]


def listing(pattern: str | None, place: RunPlace) -> tuple[list[Kernel], Findings]:
    """Return kernels, and a finding on whether each can run, by environment and kernel.

    Args:
        pattern: comma-separated names and globs, as for `kernels`.
        place: the device and the environments where the kernels would run.

    Raises:
        ChoiceError: the device does not exist.
        KernelNameError: a name or glob matches no kernel.
        WorkerError: an environment does not work.
    """
    from replay.workers.process import first_processes

    check_name(place.device)
    pythons = place.interpreters()
    with contextlib.ExitStack() as stack:
        first = None
        if not place.in_process:
            first = stack.enter_context(first_processes(place.timeout))
            first.prepare(place.device)  # the worker prepares while this process imports PyTorch
        device = device_of(place.device)
        listed = kernels(pattern)

        from replay.workers.execution import execution

        where = stack.enter_context(execution(first, pythons, place.timeout))
        return listed, where.probe(listed, device)
