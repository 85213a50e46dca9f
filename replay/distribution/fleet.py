"""The distribution of calls over devices, each with separate workers and one call at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from replay.bench.reported_stages import DONE, FIRST_CALLS, FIRST_CALLS_DONE
from replay.bench.settings import Settings
from replay.distribution.device_slots import Device, held
from replay.distribution.shared_compiling import Compilation, compilations
from replay.kernels.registry import Kernel
from replay.rows.row import KernelId, Machine, Row
from replay.workers.environment_options import WorkerError
from replay.workers.execution import Assignment, Execution, Findings, Progress, Workers
from replay.workers.process import Placement, first_processes
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)

CONTINUES = "; --resume continues on others"
"""End of an error message about lost devices."""
ATTEMPTS = 2
"""Number of devices that try a call, if its worker ends and no kernel is to blame."""

W = TypeVar("W")
T = TypeVar("T")


class DeviceWorkers(Execution, Protocol):
    """Workers of one device: `replay.workers.execution.Workers`, local or on another machine."""

    def first_calls(
        self, workload: Workload, assigned: Assignment, settings: Settings, report: Progress
    ) -> Mapping[KernelId, float]:
        """Call each kernel once; return the milliseconds of these first calls."""

    def work_on(self, device: torch.device) -> bool:
        """Return whether a new worker can compute anything on the device."""


@dataclass
class DeviceSlot:
    """A device with its workers."""

    device: Device
    workers: DeviceWorkers
    is_lost: bool = False
    """True if workers can no longer compute on the device."""


class CallOutcome(NamedTuple):
    """Result of a call on one device."""

    device: Device
    rows: list[Row]
    trouble: str = ""
    """Reason to try the call on another device; empty after success or the failure of a kernel."""
    is_device_lost: bool = False


class Fleet:
    """An `Execution` that gives each device one call at a time, with all its kernels.

    A kernel and its baseline therefore share a device and rounds, and no other call runs on the
    device. If a worker ends and no kernel is to blame, another device of the same type tries the
    call once more.
    """

    def __init__(self, slots: Sequence[DeviceSlot], pool: ThreadPoolExecutor) -> None:
        self._slots = slots
        self._pool = pool
        self._events: SimpleQueue[Future[Any] | tuple[Workload, str, str]] = SimpleQueue()

    @property
    def at_a_time(self) -> int:
        return len(self._slots)

    def machines(self, device: torch.device) -> list[Machine]:
        first = self._of_each_kind()
        return [machine for slot in first for machine in slot.workers.machines(device)]

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Findings:
        """Return the results from the first type of device that can run each kernel."""
        merged: Findings = {}
        for slot in self._of_each_kind():
            for name, found in slot.workers.probe(kernels, device).items():
                known = merged.setdefault(name, {})
                able = {kernel: probe for kernel, probe in found.items() if probe.reason is None}
                merged[name] = found | known | able
        return merged

    def _of_each_kind(self) -> list[DeviceSlot]:
        """Return the first slot of each type of device, sorted by type."""
        first = {slot.device.kind: slot for slot in reversed(self._slots)}
        return [slot for _, slot in sorted(first.items())]

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> Iterator[Row]:
        """Yield rows of every kernel on every call, as calls are finished.

        Raises:
            WorkerError: no device works, or an environment works on no device.
        """
        compiled = self._compile(schedule, assigned, settings, report)
        failed: dict[int, list[CallOutcome]] = {}
        """Outcomes of each call that waits for another device, keyed by the call's id."""

        def take(slot: DeviceSlot) -> Workload | None:
            return None if slot.is_lost else schedule.take(slot.device.name, slot.device.kind)

        work = partial(self._replay_call, assigned=assigned, settings=settings)
        for slot, workload, future in self._spread(take, work, report):
            outcome, earlier = future.result(), failed.pop(id(workload), [])
            if outcome.is_device_lost:
                slot.is_lost = True
                logger.warning("replay: %s is given up: %s", slot.device, outcome.trouble)
            if outcome.trouble and len(earlier) + 1 < ATTEMPTS:
                schedule.give_back(workload, slot.device.name)
                failed[id(workload)] = [*earlier, outcome]
                continue
            report(workload, DONE)
            first_ms = compiled.get((outcome.device.host, workload.label), {})
            yield from _finished(outcome, earlier, first_ms)
        left = {slot.device.kind for slot in self._slots if not slot.is_lost}
        waiting = schedule.waiting
        for workload in [call for call in schedule.calls if id(call) in failed]:
            outcome = failed[id(workload)][-1]  # no other device took the call
            if outcome.rows or outcome.device.kind in left:
                report(workload, DONE)
                yield from _finished(outcome, [], {})
                waiting -= 1
        if waiting:
            lost = {slot.device.kind for slot in self._slots} - left
            which = " and no ".join(sorted(lost)) if left else "device"
            raise WorkerError(f"no {which} is left that works{CONTINUES}")

    def _compile(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Progress
    ) -> dict[tuple[str, str], dict[KernelId, float]]:
        """Compile every kernel for each form of call; use one device of each host and type.

        Returns:
            Milliseconds of first calls, keyed by host and call.
        """
        waiting = {
            place: compilations(
                [call for call in schedule.calls if call.on in ("", place[1])], assigned, devices
            )
            for place, devices in Counter(map(_place, self._slots)).items()
        }
        found: dict[tuple[str, str], dict[KernelId, float]] = {}

        def take(slot: DeviceSlot) -> Compilation | None:
            return waiting[_place(slot)].pop(0) if waiting[_place(slot)] else None

        work = partial(self._first_calls, settings=settings)
        for slot, job, future in self._spread(take, work, report):
            report(job.workload, FIRST_CALLS_DONE, slot.device.name)
            schedule.prefer(job.workload, slot.device.name)
            with contextlib.suppress(WorkerError):  # the replay will report the same error
                made = found.setdefault((slot.device.host, job.workload.label), {})
                made.update(future.result())
        return found

    def _spread(
        self,
        take: Callable[[DeviceSlot], W | None],
        work: Callable[[DeviceSlot, W], T],
        report: Progress,
    ) -> Iterator[tuple[DeviceSlot, W, Future[T]]]:
        """Keep every device busy, with one job at a time, until no job remains."""
        idle = list(self._slots)
        busy: dict[Future[T], tuple[DeviceSlot, W]] = {}
        while True:
            for slot in list(idle):
                job = take(slot)
                if job is not None:
                    future = self._pool.submit(work, slot, job)
                    busy[future] = slot, job
                    idle.remove(slot)
                    future.add_done_callback(lambda done: self._events.put(done))
            if not busy:
                return
            event = self._events.get()
            if isinstance(event, tuple):
                report(*event)
                continue
            slot, job = busy.pop(event)
            idle.append(slot)
            yield slot, job, event

    def _replay_call(
        self, slot: DeviceSlot, workload: Workload, assigned: Assignment, settings: Settings
    ) -> CallOutcome:
        """Replay a call on a device, in a separate thread."""
        on_stage = partial(self._say, slot)
        try:
            rows = list(slot.workers.replay(Schedule([workload]), assigned, settings, on_stage))
            if any(not row.machine.device for row in rows):  # a worker died before reporting
                (machine,) = slot.workers.machines(settings.device)
                rows = [
                    row if row.machine.device else replace(row, machine=machine) for row in rows
                ]
            blameless = [row for row in rows if not row.kernel and row.status != "error"]
            trouble = blameless[0].reason if blameless else ""
            if not trouble:
                return CallOutcome(slot.device, rows)
        except WorkerError as error:
            rows, trouble = [], str(error)
        is_lost = not slot.workers.work_on(settings.device)
        return CallOutcome(slot.device, rows, trouble, is_lost)

    def _first_calls(
        self, slot: DeviceSlot, job: Compilation, settings: Settings
    ) -> Mapping[KernelId, float]:
        """Make first calls on a device, in a separate thread."""
        say = partial(self._say, slot)
        say(job.workload, FIRST_CALLS)
        return slot.workers.first_calls(job.workload, job.assigned, settings, say)

    def _say(self, slot: DeviceSlot, workload: Workload, stage: str, device: str = "") -> None:
        if stage != DONE:
            self._events.put((workload, stage, device or slot.device.name))


def _finished(
    outcome: CallOutcome, earlier: Sequence[CallOutcome], first_ms: Mapping[KernelId, float]
) -> list[Row]:
    """Add the device of a call, and its failures on other devices, to its rows.

    Args:
        earlier: the call's failures on other devices.
        first_ms: milliseconds of first calls, for kernels that were compiled on this call.
    """
    if not outcome.rows:
        raise WorkerError(outcome.trouble + CONTINUES * outcome.is_device_lost)
    flags = tuple(
        f"measured after {attempt.device} failed: {attempt.trouble}" for attempt in earlier
    )
    return [
        replace(
            row,
            ran_on=str(outcome.device),
            host=outcome.device.host,
            flags=(*row.flags, *flags),
            first_call_ms=first_ms.get(row.id, row.first_call_ms),
        )
        for row in outcome.rows
    ]


def _place(slot: DeviceSlot) -> tuple[str, str]:
    """Return a device's host and type; devices with equal results share compilers' caches."""
    return slot.device.host, slot.device.kind


@contextlib.contextmanager
def running_fleet(slots: Sequence[DeviceSlot], stopped: threading.Event) -> Iterator[Fleet]:
    """Run devices for the `with` block, and stop their work at its end."""
    with ThreadPoolExecutor(len(slots), "device") as pool:
        try:
            yield Fleet(slots, pool)
        finally:
            stopped.set()  # before the pool waits for its threads


@contextlib.contextmanager
def fleet(
    devices: Sequence[Device],
    interpreters: dict[str, str],
    timeout: float,
    stopped: threading.Event,
) -> Iterator[Fleet]:
    """Start workers and a judge for each device; all end with the `with` block.

    Args:
        interpreters: other Python environments by name.
        timeout: seconds without a message after which a worker is ended.
        stopped: event that stops all work, within a second or two.

    Raises:
        DeviceError: another replay measures on one of the devices.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(devices))
        slots = []
        for device in devices:
            place = Placement(device.variables, device.cpus, stopped)
            first = stack.enter_context(first_processes(timeout, place))
            first.prepare(None)
            workers = Workers.around(first, interpreters, timeout)
            stack.callback(workers.close)
            slots.append(DeviceSlot(device, workers))
        yield stack.enter_context(running_fleet(slots, stopped))
