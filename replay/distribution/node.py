"""The workers of one device of a cluster, in a process on the device's node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_replay import __version__
from replay.bench.settings import Settings
from replay.distribution.device_slots import Device, held, with_own_cores
from replay.distribution.transfer import FileFacts, directory_here, lacking, receive
from replay.kernels.registry import find
from replay.rows.row import KernelId, Machine, Row
from replay.timing.machine import describe
from replay.workers.environment_options import WorkerError
from replay.workers.execution import Assignment, Findings, Workers
from replay.workers.process import Placement, first_processes
from replay.workloads.schedule import Schedule
from replay.workloads.sources import Source
from replay.workloads.workload import Workload

Names = Mapping[str, Sequence[str]]
"""Names of kernels, keyed by environment."""


@dataclass(frozen=True)
class Introduction:
    """Description of a device and its node."""

    machine: Machine
    uuid: str
    index: str
    """Index of the GPU on the node; empty for a CPU."""
    version: str
    """Version of this package."""


class Node:
    """Workers of one device, for use by a process on another machine.

    The CPU cores of a node are divided among its devices in use.

    Args:
        share: index of this device and number of devices in use on the node.
        directory: working directory of the command, used if it exists on this node, because file
            names may be relative to it.
        interpreters: other Python environments by name, with paths on this node.
        timeout: seconds without a message after which a worker is ended.
    """

    def __init__(
        self, share: tuple[int, int], directory: str, interpreters: dict[str, str], timeout: float
    ) -> None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
        self._share = share
        self._interpreters = interpreters
        self._timeout = timeout
        self._workers: Workers
        self._stack = contextlib.ExitStack()

    def start(self, device: str) -> Introduction:
        """Start the workers, and check that each worker can compute.

        Args:
            device: `cuda` for the only GPU visible to this process, or `cpu`.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise WorkerError("PyTorch finds no GPU there")
        machine, uuid = describe(torch.device(device)), ""
        if device == "cuda":
            found = getattr(torch.cuda.get_device_properties(0), "uuid", "")
            uuid = f"GPU-{found}" if found else ""
        number, count = self._share
        own = with_own_cores([Device(machine.device, machine.device, uuid)] * count)[number]
        place = Placement(cpus=own.cpus)
        self._stack.enter_context(held([own]))
        first = self._stack.enter_context(first_processes(self._timeout, place))
        first.prepare(device)
        self._workers = Workers.around(first, self._interpreters, self._timeout)
        self._stack.callback(self._workers.close)
        self._workers.check(torch.device(device))
        index = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device == "cuda" else ""
        return Introduction(machine, uuid, index, __version__)

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def probe(self, kernels: Sequence[str], device: str) -> Findings:
        return self._workers.probe(list(map(find, kernels)), torch.device(device))

    def work_on(self, device: str) -> bool:
        return self._workers.work_on(torch.device(device))

    def expect(self, files: Sequence[FileFacts]) -> tuple[Path, list[FileFacts]]:
        """Return the directory for the files of a call, and the files that are missing in it."""
        directory = directory_here(files)
        return directory, lacking(files, directory)

    def receive(self, facts: FileFacts, content: bytes, directory: Path) -> None:
        """Write a file that another machine sent."""
        receive(facts, content, directory)

    def replay(self, source: Source, assigned: Names, settings: Settings) -> list[Row]:
        """Return the rows of a call.

        Args:
            source: the call, with files on this node.

        Raises:
            WorkerError: an environment does not work.
        """
        schedule, kernels = Schedule([Workload.of(source)]), _kernels(assigned)
        return list(self._workers.replay(schedule, kernels, settings, _unreported))

    def first_calls(
        self, source: Source, assigned: Names, settings: Settings
    ) -> dict[KernelId, float]:
        """Call each kernel once; return the milliseconds of these first calls."""
        kernels = _kernels(assigned)
        return self._workers.first_calls(Workload.of(source), kernels, settings, _unreported)


def _kernels(assigned: Names) -> Assignment:
    return {name: list(map(find, names)) for name, names in assigned.items()}


def _unreported(workload: Workload, stage: str, device: str = "") -> None: ...
