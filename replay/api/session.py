"""Session of a replay, which turns a request into rows.

The worker processes start first and import torch while this process prepares, so this module does
not import torch until a session begins.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from capture.text.counted import counted
from replay.api.choices import ReplayRequest, RunPlace
from replay.api.chosen_device import device_of
from replay.api.chosen_kernels import able_kernels, chosen_kernels
from replay.api.messages import say
from replay.api.outcome import Outcome, left_out, of_complete_calls
from replay.api.run_stamp import RunStamp
from replay.distribution.pace import Pace
from replay.distribution.time_limit import TimeLimit, in_words
from replay.kernels.registered_functions import sources
from replay.timing.defaults import MINIMUM_ROUNDS

if TYPE_CHECKING:
    import torch

    from capture.storage.dataset import Dataset
    from replay.bench.settings import Settings
    from replay.distribution.ray_cluster import Cluster
    from replay.kernels.registry import Kernel
    from replay.rows.row import Machine, Row
    from replay.workers.execution import Assignment, Execution
    from replay.workers.process import First
    from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)

LONG_SECONDS = 30.0
"""Minimum expected seconds of a replay without a time limit to be announced on a terminal."""


class Session:
    """Running replay, active during a `with` block.

    Args:
        early: worker processes that are already started; None to start them in the block.
        quiet: True to show only warnings.
    """

    dataset: Dataset | None
    """The open recording; None if the calls are not recorded."""
    device: torch.device
    """Device that kernels run on; if there are several devices, only their type."""
    machines: list[Machine]
    """One machine for each type of device."""
    settings: Settings
    kernels: list[Kernel]
    assigned: Assignment
    """The kernels to run, by environment."""
    pythons: dict[str, str]
    """The interpreters of other Python environments, by name."""
    workloads: list[Workload]
    """The calls to replay."""

    def __init__(
        self,
        request: ReplayRequest,
        *,
        early: First | None = None,
        quiet: bool = False,
    ) -> None:
        self.request = request
        self.limit = TimeLimit(request.max_time)
        self._early = early
        self._quiet = quiet
        self._where: Execution
        self._stamp: RunStamp
        self._rows: list[Row] = []
        self._pace: Pace | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _enter(self, stack: contextlib.ExitStack) -> None:
        request, place = self.request, self.request.place
        self._stamp = RunStamp.now()  # before a kernel can change the current directory
        cluster = None
        first = self._early
        if place.ray is not None:
            from replay.distribution.ray_cluster import connected

            cluster = stack.enter_context(connected(place.ray))
        elif not place.in_process and place.gpus is None and first is None:
            first = stack.enter_context(_first_processes(request, self.limit))
        self.device = device_of(place.device) if cluster is None else cluster.device
        self.pythons = place.interpreters()
        self.dataset = request.calls.opened(quiet=self._quiet)
        self._where = stack.enter_context(self._execution(first, cluster))
        self.kernels = chosen_kernels(
            request.kernels,
            request.measure.special_kernels,
            self._where,
            self.device,
            workers=not place.in_process,
        )
        self.settings = request.measure.settings(self.device)
        self.machines = self._where.machines(self.device)
        found = request.calls.found(self.dataset, quiet=self._quiet)
        if cluster is None and found.specs:
            from replay.bench.feasibility import check_size

            check_size(found.specs, self.device, len(able_kernels(self.kernels, self.device)))
        self.workloads = found.workloads
        if found.note:
            say(found.note)
        if not self._quiet and (rounds := request.measure.rounds) < MINIMUM_ROUNDS:
            say(f"--rounds {rounds} cannot decide a speed-up: give at least {MINIMUM_ROUNDS}")
        if not self._quiet and (unread := self._no_readings()):
            say(unread)
        from replay.workers.execution import assigned

        self.assigned = assigned(self._where, self.kernels, self.device, self.pythons)
        for name, kernels in self.assigned.items():
            logger.info("in %s: %s", name, ", ".join(kernel.name for kernel in kernels))

    def _execution(
        self, first: First | None, cluster: Cluster | None
    ) -> contextlib.AbstractContextManager[Execution]:
        place, stopped = self.request.place, self.limit.stopped
        if cluster is not None:
            return cluster.fleet(self.pythons, place.timeout, stopped)
        if place.gpus is None:
            return self._one_device(first)
        from replay.distribution.device_slots import gpus
        from replay.distribution.fleet import fleet

        return fleet(gpus(place.gpus), self.pythons, place.timeout, stopped)

    @contextlib.contextmanager
    def _one_device(self, first: First | None) -> Iterator[Execution]:
        """Run kernels on one device, and warn if another replay is measuring on it."""
        from replay.distribution.device_slots import held_if_free
        from replay.workers.execution import execution

        with (
            held_if_free(self.device) as trouble,
            execution(first, self.pythons, self.request.place.timeout) as where,
        ):
            if trouble:
                say(f"{trouble}; times include the load of both")
            yield where

    def _no_readings(self) -> str:
        """Return a sentence on why rows will lack some GPU readings; empty if they will not."""
        from replay.timing.gpu_state import why_no_state

        if self.request.place.ray is not None:
            return ""  # readings of this machine do not describe the nodes
        if self.device.type == "cpu" and "energy" in self.request.measure.metrics:
            return "energy needs an NVIDIA GPU"
        return why_no_state(self.device)

    def rows(self) -> Generator[Row, None, None]:
        """Yield rows when their call is finished, except rows of a resumed file."""
        from replay.distribution.estimate import Rates, expected_seconds, kernel_work, together

        calls = self._calls
        if self.request.resume is not None:
            self._rows, calls = self._resumed(self.request.resume)
        if not calls:
            return
        able = {name: able_kernels(kernels, self.device) for name, kernels in self.assigned.items()}
        rates = Rates.of(self.device)
        expected = expected_seconds(calls, able, self.settings, rates)
        # The nodes of a cluster report no kernels.
        work = kernel_work(calls, able) if self.request.place.ray is None else None
        pace = Pace(expected, self._where.at_a_time, kernels=work, limit=self.limit)
        self._pace = pace
        seconds = together([*expected.values()], pace.at_a_time)
        is_long = self.limit.seconds is not None or seconds >= LONG_SECONDS
        is_silent = not sys.stderr.isatty()  # so no progress is shown
        if (is_long or is_silent) and not self._quiet:
            kernels = len({kernel.name for group in able.values() for kernel in group})
            say(self._announced(calls, kernels, seconds))
        with contextlib.closing(self._measured(calls, pace)) as measured:
            for measured_row in measured:
                row = replace(measured_row, **self._stamp._asdict())
                self._rows.append(row)
                if row.first_call_ms is not None:
                    logger.info("first call of %s: %.1f ms", row.id, row.first_call_ms)
                yield row
        if is_silent and not self._quiet:
            say(f"the replay took {in_words(pace.elapsed)}")

    def outcome(self, *, is_early_end: bool = False) -> Outcome:
        """Return the results that the session has measured so far.

        Args:
            is_early_end: True if an error or Ctrl-C ended the session, so a call may lack rows.
        """
        from replay.bench.resume import label_of, latest

        places = {workload.label: place for place, workload in enumerate(self._calls)}
        label = {id(row): label_of(row, self.machines) for row in self._rows}
        in_order = sorted(latest(self._rows), key=lambda row: places[label[id(row)]])
        shown = in_order
        if is_early_end:
            shown = of_complete_calls(in_order, self.assigned, self.machines)
        is_in_order = [id(row) for row in in_order] == [id(row) for row in self._rows]
        missing = left_out(self._calls, shown, self.machines, self.assigned)
        return Outcome(shown, in_order, is_in_order, missing, self._why_left_out())

    def _why_left_out(self) -> str:
        """Return the reason why calls are left out; empty without a time limit."""
        limit = self.limit.seconds
        first = 0.0 if self._pace is None else self._pace.first_call_seconds
        if limit is None:
            return ""
        if first > limit:
            return (
                f"the first call took {in_words(first)}, longer than the limit of {in_words(limit)}"
            )
        return f"to end within {in_words(limit)}"

    @property
    def _calls(self) -> list[Workload]:
        """Return the calls to replay, repeated for each type of device."""
        if len(self.machines) == 1:
            return self.workloads
        return [
            replace(call, on=machine.device) for machine in self.machines for call in self.workloads
        ]

    def _resumed(self, path: Path) -> tuple[list[Row], list[Workload]]:
        """Return a file's rows of completed calls, and the calls that remain to be replayed."""
        from replay.bench.resume import finished_rows
        from replay.rows.row_files import save_jsonl

        kept, left = finished_rows(path, self._calls, self.assigned, self.machines, self.settings)
        save_jsonl(kept, path)
        if kept and not self._quiet:
            count = len(self._calls) - len(left)
            are = "1 call is" if count == 1 else f"{count} calls are"
            say(
                f"{are} kept as measured before, with the rounds, seconds, seed and resources of "
                f"that time; {len(left)} to go"
            )
        return kept, left

    def _measured(self, calls: list[Workload], pace: Pace) -> Generator[Row, None, None]:
        """Yield the rows of calls until the time limit."""
        from replay.report.progress import shown_progress
        from replay.workers.process import Stopped
        from replay.workloads.representative import tiers
        from replay.workloads.schedule import Schedule

        def is_in_time(call: Workload) -> bool:
            # An estimate can be far off, so it leaves out no call before times correct it.
            return not pace.finished or self.limit.allows(pace.seconds([call.label]))

        order = None  # without a limit every call runs, in any order
        if self.limit.seconds is not None:
            names = (call.name for call in self.workloads)
            tier_of = dict(zip(names, tiers(self.workloads), strict=True))
            order = [tier_of[call.name] for call in calls]
        expected = [pace.expected[call.label] for call in calls]
        schedule = Schedule(calls, order, is_in_time, expected)
        with (
            self.limit.watched(lambda: pace.finished),
            shown_progress(pace, quiet=self._quiet) as report,
            contextlib.suppress(Stopped),
        ):
            yield from self._where.replay(schedule, self.assigned, self.settings, report)

    def _announced(self, calls: Sequence[Workload], kernels: int, seconds: float) -> str:
        """Describe the amount of work, the devices, and the expected duration."""
        devices = self._where.at_a_time
        number = len({call.name for call in calls})
        what = f"{counted(number, 'call')} × {counted(kernels, 'kernel')}"
        several = f"{devices} × " if devices > 1 else ""
        types = " and ".join(machine.device for machine in self.machines)
        sentence = f"{what} on {several}{types}: about {in_words(seconds)} (a guess)"
        if self.limit.seconds is not None and not self.limit.allows(seconds):
            within = in_words(self.limit.seconds)
            sentence += f"; the most representative calls first, for {within}"
        return sentence


@contextlib.contextmanager
def _first_processes(request: ReplayRequest, limit: TimeLimit) -> Iterator[First]:
    """Start the worker processes early, so that they import PyTorch during the preparation."""
    from replay.workers.process import Placement, first_processes

    place, here = request.place, Placement(stopped=limit.stopped)
    with first_processes(place.timeout, here, sources(request.kernels)) as first:
        prepared(first, place, request.kernels)
        yield first


def prepared(first: First, place: RunPlace, kernels: str | None) -> None:
    """Let processes initialise their device and import compilers; do not wait for them."""
    first.prepare(place.device)
    first.warm_up(kernels)
