"""`kernels`: the kernels that there are, and where they can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from replay.api.choices import joined_names
from replay.api.chosen_device import check_name, device_of

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.workers.execution import Findings


def kernels(pattern: str | Sequence[str] | None = None) -> list[Kernel]:
    """Return kernels by name.

    Args:
        pattern: names and globs, as a list or with commas between them. `FILE.py:FUNCTION` is a
            kernel of your own. By default all kernels except variants of others.

    Returns:
        Kernels with `name`, `about`, `accuracy_class` and `install`; `unavailable(device)` says why
        one cannot run on a device, or None.

    Raises:
        KernelNameError: a name or glob fits no kernel.

    Example:
        >>> [kernel.name for kernel in kernels("torch-*")]
    """
    from replay.kernels.registry import select

    return select("all" if pattern is None else joined_names(pattern))[0]


class Listing(NamedTuple):
    """Kernels, and whether each can run."""

    kernels: list[Kernel]
    findings: Findings
    """By environment and name of the kernel."""


def listing(
    pattern: str | None, device: str | None, pythons: Mapping[str, str], timeout: float
) -> Listing:
    """Return kernels and whether each can run, as worker processes find.

    Args:
        pattern: names and globs with commas between them, as for `kernels`.
        device: where they would run; None for a GPU if there is one.
        pythons: interpreters of other Python environments, by name.
        timeout: seconds after which a worker that says nothing is ended.

    Raises:
        ChoiceError: there is no such device.
        KernelNameError: a name or glob fits no kernel.
        WorkerError: an environment does not work.
    """
    from replay.workers.process import Placement, first_processes

    check_name(device)
    place = Placement()
    with first_processes(timeout, place) as first:
        first.prepare(device)  # while this process imports PyTorch
        where = device_of(device)
        listed = kernels(pattern)

        from replay.workers.execution import execution

        with execution(first, dict(pythons), timeout, place) as workers:
            return Listing(listed, workers.probe(listed, where))
