"""The execution of kernels, in worker processes (the default) or in this process."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from attention_replay.errors import Error
from replay.bench.runner import replay_here
from replay.bench.settings import Settings
from replay.kernels.failures import ContextLost, classify
from replay.kernels.registry import Kernel
from replay.rows.row import HERE, KernelId, Machine, Row
from replay.timing.machine import describe
from replay.workers.environments import Environment, ProbeResult, assign
from replay.workers.judge_process import JudgeProcess
from replay.workers.process import First
from replay.workers.shared_rounds import replay_in_workers
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)

Findings = dict[str, dict[str, ProbeResult]]
"""Probe results, keyed by environment and kernel name."""
Assignment = dict[str, list[Kernel]]
"""Kernels to run, keyed by environment."""


class Progress(Protocol):
    """Function that receives a call and the stage that it reached."""

    def __call__(self, workload: Workload, stage: str, device: str = "") -> None:
        """Receive a stage (`bench.reported_stages.STAGES`), or a kernel as `KernelId` prints it."""


class InProcessError(Error):
    """Error for a kernel that damaged this process, in which everything runs."""


class Execution(Protocol):
    """Way to run kernels."""

    @property
    def at_a_time(self) -> int:
        """Number of calls that run at the same time."""

    def machines(self, device: torch.device) -> list[Machine]:
        """Return the machines that replay every call, one for each type of device."""

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        """Find out which kernels can run in which environment."""

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> Iterator[Row]:
        """Yield the rows of every kernel on every call, call by call."""


class InProcess:
    """Execution in this process, for debugging and for functions that a worker cannot import."""

    at_a_time = 1

    def machines(self, device: torch.device) -> list[Machine]:
        return [describe(device)]

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {HERE: {kernel.name: _probed(kernel, device) for kernel in kernels}}

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> Iterator[Row]:
        under_way = ""

        def noted(workload: Workload, stage: str) -> None:
            nonlocal under_way
            under_way = f"{stage} on {workload.name}"
            report(workload, stage)

        try:
            yield from replay_here(schedule, assigned[HERE], settings, noted)
        except ContextLost as error:
            raise InProcessError(
                f"{under_way}: {error}; this process can run no more kernels; without --in-process "
                "only this row would be lost"
            ) from error


class Workers:
    """Execution in worker processes, which limits the damage that a kernel can do."""

    at_a_time = 1

    def __init__(self, environments: dict[str, Environment], judge: JudgeProcess) -> None:
        self._environments = environments
        self._judge = judge

    @classmethod
    def around(
        cls,
        first: First,
        interpreters: dict[str, str],
        timeout: float,
    ) -> Workers:
        """Make workers for this and other interpreters, with one judge for all workers."""
        judge = JudgeProcess(first.judge)
        environments = {HERE: Environment(HERE, sys.executable, timeout, first.worker, first.users)}
        for name, python in interpreters.items():
            environments[name] = Environment(name, python, timeout, first.worker.another(python))
        return cls(environments, judge)

    def close(self) -> None:
        """End all processes."""
        self._judge.end()  # the system frees the judge's GPU memory while workers end
        for environment in self._environments.values():
            environment.close()
        self._judge.close()

    def machines(self, device: torch.device) -> list[Machine]:
        return [describe(device)]

    def check(self, device: torch.device) -> None:
        """Start the workers of all environments, and have each worker compute something.

        Raises:
            WorkerError: an environment does not work.
        """
        for environment in self._environments.values():
            environment.start()
        for environment in self._environments.values():
            environment.check(device)

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        return {
            name: environment.probe(kernels, str(device))
            for name, environment in self._environments.items()
        }

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> Iterator[Row]:
        return replay_in_workers(
            schedule, assigned, settings, self._environments, self._judge, report
        )

    def first_calls(
        self, workload: Workload, assigned: Assignment, settings: Settings, report: Progress
    ) -> dict[KernelId, float]:
        """Call each kernel once, to compile the kernel; return the milliseconds of each call."""
        found: dict[KernelId, float] = {}
        for name, kernels in assigned.items():

            def on_kernel(kernel: str, name: str = name) -> None:
                report(workload, str(KernelId(kernel, name)))

            calls = self._environments[name].first_calls(workload, kernels, settings, on_kernel)
            for kernel, ms in calls.items():
                found[KernelId(kernel, name)] = ms
        return found

    def work_on(self, device: torch.device) -> bool:
        """Return whether a new worker can compute anything on a device."""
        return self._environments[HERE].works_on(device)


def assigned(
    where: Execution,
    kernels: Sequence[Kernel],
    device: torch.device,
    interpreters: Mapping[str, str],
) -> Assignment:
    """Assign kernels to environments, without probing them if there is only this interpreter."""
    if not interpreters:
        return {HERE: list(kernels)}
    return assign(kernels, where.probe(kernels, device))


@contextlib.contextmanager
def execution(
    first: First | None,
    interpreters: dict[str, str],
    timeout: float,
) -> Iterator[Execution]:
    """Yield an `Execution`, whose workers end with the `with` block.

    Args:
        first: the processes that run and judge kernels; None to use this process.
        interpreters: other Python environments by name.
        timeout: seconds without a message after which a worker is ended.
    """
    if first is None:
        yield InProcess()
        return
    workers = Workers.around(first, interpreters, timeout)
    for name, python in {HERE: sys.executable, **interpreters}.items():
        logger.info("environment %s: %s", name, python)
    try:
        yield workers
    finally:
        workers.close()


def _probed(kernel: Kernel, device: torch.device) -> ProbeResult:
    try:
        kernel = kernel.loaded()
        return ProbeResult(kernel.unavailable(device), install=kernel.install)
    except BaseException as error:
        return ProbeResult(classify(error)[1])
