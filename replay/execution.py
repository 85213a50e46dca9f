"""Where kernels run: in worker processes, which is the default, or in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from replay.checking import classify
from replay.environments import THIS, Environment, Found, allot, replay_in_workers
from replay.registry import Kernel
from replay.results import Row
from replay.runner import replay
from replay.settings import Settings
from replay.workloads import Workload

Findings = dict[str, dict[str, Found]]
"""What is known of a kernel, by environment and name."""
Allotted = dict[str, list[Kernel]]
"""The kernels to run, by environment."""
Progress = Callable[[Workload, str], None]


class Execution(Protocol):
    """A way to run kernels."""

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        """Which kernels can run, by environment."""

    def allot(self, kernels: Sequence[Kernel], device: torch.device) -> Allotted:
        """Which kernels run in which environment."""

    def replay(
        self,
        workloads: Sequence[Workload],
        allotted: Allotted,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        """Rows of every kernel on every call."""


class InProcess:
    """Everything here: for debugging, and for kernels that exist only here."""

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {THIS: {kernel.name: _found(kernel, device) for kernel in kernels}}

    def allot(self, kernels: Sequence[Kernel], device: torch.device) -> Allotted:
        return {THIS: list(kernels)}

    def replay(
        self,
        workloads: Sequence[Workload],
        allotted: Allotted,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        return replay(workloads, allotted[THIS], settings, report)


class Workers:
    """A process per environment; what a kernel breaks there stays there."""

    def __init__(self, environments: dict[str, Environment]) -> None:
        self._environments = environments

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {
            name: environment.probe(kernels, str(device))
            for name, environment in self._environments.items()
        }

    def allot(self, kernels: Sequence[Kernel], device: torch.device) -> Allotted:
        if len(self._environments) == 1:
            return {THIS: list(kernels)}
        return allot(kernels, self.probe(kernels, device))

    def replay(
        self,
        workloads: Sequence[Workload],
        allotted: Allotted,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        return replay_in_workers(workloads, allotted, settings, self._environments, report)


@contextlib.contextmanager
def execution(
    *, in_process: bool, interpreters: dict[str, str], timeout: float
) -> Iterator[Execution]:
    """The way to run kernels; workers end with the `with` block.

    Args:
        interpreters: other Python environments by name.
        timeout: seconds without a sign of life after which a worker is ended.
    """
    if in_process:
        yield InProcess()
        return
    pythons = {THIS: sys.executable, **interpreters}
    environments = {name: Environment(name, python, timeout) for name, python in pythons.items()}
    try:
        yield Workers(environments)
    finally:
        for environment in environments.values():
            environment.close()


def _found(kernel: Kernel, device: torch.device) -> Found:
    try:
        kernel = kernel.loaded()
        return Found(kernel.unavailable(device), install=kernel.install)
    except Exception as error:
        return Found(classify(error)[1])
