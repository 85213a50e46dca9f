"""Where kernels run: in worker processes, which is the default, or in this process."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from replay.bench.failures import classify
from replay.bench.runner import replay
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import HERE, Row
from replay.workers.environments import Environment, Found, assign, replay_in_workers
from replay.workers.judge import Judge
from replay.workers.process import First
from replay.workloads.recorded import Workload

logger = logging.getLogger(__name__)

Findings = dict[str, dict[str, Found]]
"""What is known of a kernel, by environment and name."""
Assignment = dict[str, list[Kernel]]
"""The kernels to run, by environment."""
Progress = Callable[[Workload, str], None]


class Execution(Protocol):
    """A way to run kernels."""

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        """Which kernels can run, by environment."""

    def assign(self, kernels: Sequence[Kernel], device: torch.device) -> Assignment:
        """Which kernels run in which environment."""

    def replay(
        self,
        workloads: Sequence[Workload],
        assigned: Assignment,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        """Rows of every kernel on every call."""


class InProcess:
    """Everything here: for debugging, and for kernels that exist only here."""

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {HERE: {kernel.name: _found(kernel, device) for kernel in kernels}}

    def assign(self, kernels: Sequence[Kernel], device: torch.device) -> Assignment:
        return {HERE: list(kernels)}

    def replay(
        self,
        workloads: Sequence[Workload],
        assigned: Assignment,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        return replay(workloads, assigned[HERE], settings, report)


class Workers:
    """A process per environment; what a kernel breaks there stays there."""

    def __init__(self, environments: dict[str, Environment]) -> None:
        self._environments = environments

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {
            name: environment.probe(kernels, str(device))
            for name, environment in self._environments.items()
        }

    def assign(self, kernels: Sequence[Kernel], device: torch.device) -> Assignment:
        if len(self._environments) == 1:
            return {HERE: list(kernels)}
        return assign(kernels, self.probe(kernels, device))

    def replay(
        self,
        workloads: Sequence[Workload],
        assigned: Assignment,
        settings: Settings,
        report: Progress,
    ) -> Iterator[Row]:
        return replay_in_workers(workloads, assigned, settings, self._environments, report)


@contextlib.contextmanager
def execution(
    first: First | None, interpreters: dict[str, str], timeout: float
) -> Iterator[Execution]:
    """The way to run kernels; workers end with the `with` block.

    Args:
        first: the processes that run and judge them; None to do all in this process.
        interpreters: other Python environments by name.
        timeout: seconds without a sign of life after which a worker is ended.
    """
    if first is None:
        yield InProcess()
        return
    judge = Judge(first.judge)
    environments = {
        HERE: Environment(HERE, sys.executable, timeout, judge=judge, worker=first.worker)
    }
    for name, python in interpreters.items():
        environments[name] = Environment(name, python, timeout, judge=judge)
    for name, python in {HERE: sys.executable, **interpreters}.items():
        logger.info("environment %s: %s", name, python)
    try:
        yield Workers(environments)
    finally:
        judge.close()
        for environment in environments.values():
            environment.close()


def _found(kernel: Kernel, device: torch.device) -> Found:
    try:
        kernel = kernel.loaded()
        return Found(kernel.unavailable(device), install=kernel.install)
    except BaseException as error:
        return Found(classify(error)[1])
