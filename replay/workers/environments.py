"""The Python environments in which kernels run, each with one or more worker processes.

Packages of kernels may conflict, so workers may use other interpreters than the parent. The
parent's own environment is called `this`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from capture.text.printable import printable
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.workers.environment_options import WorkerError
from replay.workers.messages import reading
from replay.workers.process import CannotStart, Died, Process
from replay.workloads.workload import Workload

COMMON_LIBRARIES = ("torch", "triton")
"""Libraries that most environments have. Their kernels run in only one environment."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Result of an environment's check of one kernel."""

    reason: str | None
    """Reason why the kernel cannot run in the environment; None if it can."""
    version: str = ""
    install: str = ""
    """Command that installs the kernel's library."""


class Worker:
    """A worker process, and the environment of the kernels that share it.

    Args:
        name: file, package or kernel that the worker belongs to; empty for the worker of known
            kernels.
    """

    def __init__(self, environment: str, name: str, process: Process) -> None:
        self.environment = environment
        self.name = name
        self.process = process
        self.last: dict[str, Died] = {}
        """Last unexpected end of the process, by kernel."""
        self.deaths: dict[str, int] = {}
        self.disturbances = 0
        """Number of times that the process worked while others were timed."""

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages.

        Raises:
            WorkerError: the worker cannot start, or failed for a reason other than a kernel.
            Died: the worker crashed or hung.
        """
        try:
            for message in self.process.ask(**request):
                if "failed" in message:
                    raise WorkerError(message["failed"]) from RuntimeError(message["traceback"])
                yield message
        except CannotStart as error:
            raise self.unusable(error) from error

    def probe(self, kernels: Sequence[Kernel], device: str) -> dict[str, ProbeResult]:
        """Find out which kernels can run. A kernel that ends the worker cannot run."""
        found: dict[str, ProbeResult] = {}
        while missing := [kernel.name for kernel in kernels if kernel.name not in found]:
            try:
                with reading(self.process):
                    for message in self.ask(do="probe", kernels=missing, device=device):
                        if "probed" in message:
                            name = missing[missing.index(message.pop("probed"))]
                            found[name] = ProbeResult(**message)
            except Died as death:
                if not death.kernel:
                    raise self.unusable(death) from death
                found[death.kernel] = ProbeResult(
                    f"{death.status} during the check: {death.reason}"
                )
        return found

    def first_calls(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> dict[str, float]:
        """Call each kernel once; return milliseconds.

        These calls compile the kernels. Their outputs are not judged. A kernel that ends the worker
        is left out, because the replay will report it.
        """
        waiting, found = [kernel.name for kernel in kernels], {}
        request = {"workload": workload.source.to_json(), "settings": settings.to_json()}
        while waiting:
            try:
                with reading(self.process):
                    for message in self.ask(do="call", kernels=waiting, **request):
                        if "at" in message:
                            report(printable(message["at"]))
                        elif "called" in message:
                            name = waiting[waiting.index(message["called"])]
                            found[name] = message["first_call_ms"]
                break
            except Died as death:
                if death.kernel not in waiting:
                    break
                waiting = waiting[waiting.index(death.kernel) + 1 :]
        return found

    def unusable(self, error: CannotStart | Died) -> WorkerError:
        return WorkerError(
            f"environment {self.environment} ({self.process.python}) does not work: {error}; "
            "it needs torch and safetensors"
        )


class Environment:
    """An interpreter and its workers: one for known kernels, and one for each file of a user.

    Args:
        worker: the first worker; None to start a worker on demand.
        users: workers of users' kernels that are already started, by file or package.
    """

    def __init__(
        self,
        name: str,
        python: str,
        timeout: float,
        worker: Process | None = None,
        users: Mapping[str, Process] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._shared = Worker(name, "", worker or Process(python, timeout))
        others = {file: Worker(name, file, process) for file, process in users.items()}
        self._workers = {"": self._shared, **others}
        self._can_run: dict[str, bool] = {}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.process.close()

    def worker(self, name: str) -> Worker:
        """Return the worker that belongs to a file, package or kernel."""
        if name not in self._workers:
            self._workers[name] = Worker(self.name, name, self._shared.process.another())
        return self._workers[name]

    def divided(self, kernels: Sequence[Kernel], device: str) -> dict[str, list[Kernel]]:
        """Divide kernels among workers, by the workers' names.

        A known kernel that cannot run gets no worker of its own.
        """
        found: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            is_apart = not kernel.own_process or self._runs(kernel, device)
            found.setdefault(kernel.process if is_apart else "", []).append(kernel)
        return found

    def _runs(self, kernel: Kernel, device: str) -> bool:
        if kernel.name not in self._can_run:
            found = self._shared.probe([kernel], device)
            self._can_run[kernel.name] = found[kernel.name].reason is None
        return self._can_run[kernel.name]

    def probe(self, kernels: Sequence[Kernel], device: str) -> dict[str, ProbeResult]:
        """Find out which kernels can run. A kernel that ends its worker cannot run."""
        found: dict[str, ProbeResult] = {}
        for source in dict.fromkeys(kernel.source for kernel in kernels):
            own = [kernel for kernel in kernels if kernel.source == source]
            found |= self.worker(source).probe(own, device)
        return found

    def first_calls(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> dict[str, float]:
        """Call each kernel once, in the worker that will time it; return milliseconds."""
        found: dict[str, float] = {}
        for name, own in self.divided(kernels, str(settings.device)).items():
            found |= self.worker(name).first_calls(workload, own, settings, report)
        return found

    def start(self) -> None:
        """Start the worker of known kernels without waiting until it is ready."""
        try:
            self._shared.process.start()
        except CannotStart as error:
            raise self._shared.unusable(error) from error

    def check(self, device: torch.device) -> None:
        """Have the worker of known kernels compute something.

        Raises:
            WorkerError: the worker cannot compute.
        """
        try:
            found = self._shared.process.answer(do="touch", device=str(device))
        except (CannotStart, Died) as error:
            raise self._shared.unusable(error) from error
        if "works" not in found:
            raise WorkerError(f"environment {self.name} cannot use {device}: {found['failed']}")

    def works_on(self, device: torch.device) -> bool:
        """Return whether a new worker can compute anything on a device."""
        self._shared.process.close()
        try:
            self.check(device)
        except WorkerError:
            return False
        return True


def assign(
    kernels: Sequence[Kernel], found: dict[str, dict[str, ProbeResult]]
) -> dict[str, list[Kernel]]:
    """Assign kernels to environments.

    A kernel runs in every environment that has its library. PyTorch's kernels and ours run only in
    the first environment that can run them, because most environments can. A kernel that cannot run
    anywhere is assigned to the first environment, where its row states the reason.

    Args:
        found: results of `Environment.probe`, keyed by environment.
    """
    first = next(iter(found))
    assigned: dict[str, list[Kernel]] = {name: [] for name in found}
    for kernel in kernels:
        able = [name for name in found if found[name][kernel.name].reason is None]
        if kernel.library in COMMON_LIBRARIES:
            able = able[:1]
        for name in able or [first]:
            assigned[name].append(kernel)
    return assigned
