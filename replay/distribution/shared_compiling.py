"""The compilation of kernels before anything is timed, divided among devices.

Compilers keep their results on disk, so one device compiles for all devices of its type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from replay.kernels.registry import Kernel
from replay.workers.execution import Assignment
from replay.workloads.workload import Workload

PIECES_PER_DEVICE = 2
"""Minimum number of jobs per device; some kernels compile for minutes and others not at all."""


class Compilation(NamedTuple):
    """Job for one device: a call, and the kernels to run once on this call."""

    workload: Workload
    assigned: Assignment


def compilations(
    calls: Sequence[Workload], assigned: Assignment, devices: int
) -> list[Compilation]:
    """Return jobs that run every kernel on the first call of each form.

    The kernels of a form stay together if there are enough forms for all devices.
    """
    firsts: dict[tuple[object, ...], Workload] = {}
    for workload in calls:
        firsts.setdefault(workload.source.metadata().form, workload)
    if not firsts:
        return []
    pieces = math.ceil(PIECES_PER_DEVICE * devices / len(firsts))
    everyone = [(name, kernel) for name, kernels in assigned.items() for kernel in kernels]
    return [
        Compilation(workload, _by_environment(everyone[piece::pieces]))
        for workload in firsts.values()
        for piece in range(min(pieces, len(everyone)))
    ]


def _by_environment(kernels: Sequence[tuple[str, Kernel]]) -> Assignment:
    found: Assignment = {}
    for name, kernel in kernels:
        found.setdefault(name, []).append(kernel)
    return found
