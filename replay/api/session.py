"""Session of a replay, from a request to its rows: places, order of work, and work left undone.

The module does not import torch until the session begins: the worker processes start earlier, and
import torch in the meantime.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from capture.text.counted import counted
from capture.text.printable import printable
from replay.api.call_choices import ChosenCalls
from replay.api.choices import ReplayRequest, RunPlace
from replay.api.chosen_device import device_of
from replay.api.chosen_kernels import able_kernels, chosen_kernels
from replay.api.outcome import Outcome, left_out, of_complete_calls, without_variants
from replay.distribution.pace import Pace
from replay.distribution.time_limit import TimeLimit, in_words

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
"""Minimum length of a replay that is announced; shorter ones end before a user decides to wait."""

NOT_COMPARED = ("--rounds", "--max-seconds", "--max-noise", "--seed", "--metric resources")
"""Options that rows do not contain, so that `--resume` cannot detect their change."""


def say_on_stderr(sentence: str) -> None:
    """Print a sentence about a replay on stderr."""
    print(f"replay: {printable(sentence)}", file=sys.stderr)


@dataclass
class _Part:
    """Calls to replay with the same kernels."""

    assigned: Assignment
    calls: list[Workload]
    tiers: list[int]
    """Tier of each call (`replay.workloads.representative`); all tiers are equal without a time
    limit."""
    pace: Pace
    kernels: int
    """Number of kernels."""

    @property
    def seconds(self) -> float:
        """Return the expected duration in seconds, without compilation."""
        from replay.distribution.estimate import together

        expected = [self.pace.expected[call.label] for call in self.calls]
        return together(expected, self.pace.at_a_time) * (self.pace.scale or 1.0)


class Session:
    """Running replay, active during a `with` block.

    Args:
        early: worker processes that are already started; None to start them in the block.
        quiet: True to show only warnings.
        say: function that shows a sentence to the user.

    Attributes:
        dataset: the open recording; None if the calls are not recorded.
        device: device that kernels run on; with several devices, their type.
        machines: one machine for each type of device.
        settings: settings for timing and judging.
        kernels: the kernels to run.
        assigned: the kernels by environment.
        pythons: the interpreters of the other environments.
        workloads: the calls.
    """

    dataset: Dataset | None
    device: torch.device
    machines: list[Machine]
    settings: Settings
    kernels: list[Kernel]
    assigned: Assignment
    pythons: dict[str, str]
    workloads: list[Workload]

    def __init__(
        self,
        request: ReplayRequest,
        *,
        early: First | None = None,
        quiet: bool = False,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self.request = request
        self.limit = TimeLimit(request.max_time)
        self._early = early
        self._quiet = quiet
        self._say = say
        self._where: Execution
        self._rows: list[Row] = []
        self._parts: list[_Part] = []
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
            request.kernels, request.measure.special_kernels, self._where, self.device
        )
        self.settings = request.measure.settings(self.device)
        self.machines = self._where.machines(self.device)
        found = request.calls.found(self.dataset, quiet=self._quiet)
        if cluster is None:
            self._check_size(found)
        self.workloads = found.workloads
        if found.note:
            self._say(found.note)
        if not self._quiet and (unread := self._no_readings()):
            self._say(unread)
        self.assigned = self._where.assign(self.kernels, self.device)
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
        from replay.workers.process import Placement

        place = Placement(stopped=self.limit.stopped)
        with (
            held_if_free(self.device) as trouble,
            execution(first, self.pythons, self.request.place.timeout, place) as where,
        ):
            if trouble:
                self._say(f"{trouble}; times include the load of both")
            yield where

    def _check_size(self, found: ChosenCalls) -> None:
        """Raise ShapeError if random calls are too large for this machine."""
        if found.specs:
            from replay.bench.feasibility import check_size

            check_size(found.specs, self.device, len(able_kernels(self.kernels, self.device)))

    def _no_readings(self) -> str:
        """Return a sentence about machine readings that the rows will lack, with the reason."""
        from replay.timing.gpu_state import why_no_state

        if self.request.place.ray is not None:
            return ""  # this machine's readings do not describe the nodes
        if self.device.type == "cpu" and "energy" in self.request.measure.metrics:
            return "energy needs an NVIDIA GPU"
        return why_no_state(self.device)

    def rows(self) -> Generator[Row, None, None]:
        """Yield rows as calls are finished, excluding the rows of a resumed file."""
        self._parts = self._planned()
        seconds = sum(part.seconds for part in self._parts)
        is_long = self.limit.seconds is not None or seconds >= LONG_SECONDS
        if self._parts and is_long and not self._quiet:
            self._say(self._announced())
        with contextlib.closing(self._measured()) as measured:
            for row in measured:
                self._rows.append(row)
                if row.first_call_ms is not None:
                    logger.info("first call of %s: %.1f ms", row.id, row.first_call_ms)
                yield row

    def outcome(self, *, is_early_end: bool = False) -> Outcome:
        """Return the results that the session has measured so far.

        Args:
            is_early_end: True if an error or Ctrl-C ended the session, so that a call may lack some
                rows.
        """
        from replay.bench.resume import label_of, latest

        places = {workload.label: place for place, workload in enumerate(self._calls)}
        label = {id(row): label_of(row, self.machines) for row in self._rows}
        in_order = sorted(latest(self._rows), key=lambda row: places[label[id(row)]])
        shown = in_order
        if is_early_end:
            shown = of_complete_calls(in_order, self._stages(), self.machines)
        is_in_order = [id(row) for row in in_order] == [id(row) for row in self._rows]
        missing = left_out(self._calls, shown, self.machines, self.assigned)
        return Outcome(shown, in_order, is_in_order, missing)

    @property
    def _calls(self) -> list[Workload]:
        """Return the calls, once for each type of device."""
        if len(self.machines) == 1:
            return self.workloads
        return [
            replace(call, on=machine.device) for machine in self.machines for call in self.workloads
        ]

    def _stages(self) -> list[Assignment]:
        """Return the kernels of each pass over all calls; variants come in a second pass."""
        first = without_variants(self.assigned)
        return [self.assigned] if first is None else [first, self.assigned]

    def _planned(self) -> list[_Part]:
        """Return the parts to measure, without the rows that a resumed file already has."""
        from replay.distribution.estimate import Rates, expected_seconds
        from replay.workloads.representative import tiers

        calls, stages = self._calls, self._stages()
        left = [calls] * len(stages)
        if self.request.resume is not None:
            self._rows, left = self._resumed(self.request.resume, stages)
        tier_of: dict[str, int] = {}
        if self.limit.seconds is None:  # every call runs, so their order does not matter
            stages, left = stages[-1:], left[-1:]
        else:
            names = (call.name for call in self.workloads)
            tier_of = dict(zip(names, tiers(self.workloads), strict=True))
        rates, parts = Rates.of(self.device), []
        for stage, waiting in zip(stages, left, strict=True):
            able = {name: able_kernels(kernels, self.device) for name, kernels in stage.items()}
            expected = expected_seconds(waiting, able, self.settings, rates)
            pace = Pace(expected, self._where.at_a_time)
            if waiting:
                kernels = len({kernel.name for group in able.values() for kernel in group})
                order = [tier_of.get(call.name, 0) for call in waiting]
                parts.append(_Part(stage, waiting, order, pace, kernels))
        return parts

    def _resumed(
        self, path: Path, stages: Sequence[Assignment]
    ) -> tuple[list[Row], list[list[Workload]]]:
        """Return the complete rows of a file, and the remaining calls of every stage."""
        from replay.bench.resume import finished_rows, label_of
        from replay.rows.row_files import save_jsonl

        rows: dict[str, list[Row]] = {}
        left: list[list[Workload]] = []
        for stage in stages:
            found, waiting = finished_rows(path, self._calls, stage, self.machines, self.settings)
            of_stage: dict[str, list[Row]] = {}
            for row in found:
                of_stage.setdefault(label_of(row, self.machines), []).append(row)
            rows |= of_stage
            left.append(waiting)
        kept = [row for call in self._calls for row in rows.get(call.label, [])]
        save_jsonl(kept, path)
        if kept and not self._quiet:
            labels = {label_of(row, self.machines) for row in kept}
            count = len(labels - {call.label for call in left[-1]})
            are = "1 call is" if count == 1 else f"{count} calls are"
            self._say(
                f"{are} kept as measured before, even if {', '.join(NOT_COMPARED)} changed; "
                f"{len(left[-1])} to go"
            )
        return kept, left

    def _measured(self) -> Generator[Row, None, None]:
        """Yield the rows of all parts until the time is over."""
        from replay.report.progress import shown_progress
        from replay.workers.process import Stopped
        from replay.workloads.schedule import Schedule

        with self.limit.watched():
            for part in self._parts:
                pace = part.pace

                def is_in_time(call: Workload, pace: Pace = pace) -> bool:
                    scale = pace.scale if pace.is_reliable else None
                    return self.limit.allows(pace.expected[call.label] * (scale or 1.0))

                expected = [pace.expected[call.label] for call in part.calls]
                schedule = Schedule(part.calls, part.tiers, is_in_time, expected)
                with shown_progress(pace, quiet=self._quiet) as report:
                    try:
                        yield from self._where.replay(
                            schedule, part.assigned, self.settings, report
                        )
                    except Stopped:
                        return

    def _announced(self) -> str:
        """Return the announcement: the work, its place, and the expected duration."""
        parts = self._parts
        calls = len({call.name for part in parts for call in part.calls})
        devices = parts[0].pace.at_a_time
        what = f"{counted(calls, 'call')} × {counted(parts[-1].kernels, 'kernel')}"
        several = f"{devices} × " if devices > 1 else ""
        types = " and ".join(machine.device for machine in self.machines)
        seconds = sum(part.seconds for part in parts)
        sentence = f"{what} on {several}{types}: about {in_words(seconds)} (a guess)"
        if self.limit.seconds is not None and not self.limit.allows(seconds):
            within = in_words(self.limit.seconds)
            sentence += f"; the most representative calls first, for {within}"
        return sentence


@contextlib.contextmanager
def _first_processes(request: ReplayRequest, limit: TimeLimit) -> Iterator[First]:
    """Start the processes of the device; they import PyTorch in the meantime."""
    from replay.workers.process import Placement, first_processes

    place = request.place
    with first_processes(place.timeout, Placement(stopped=limit.stopped)) as first:
        prepared(first, place, request.kernels)
        yield first


def prepared(first: First, place: RunPlace, kernels: str | None) -> None:
    """Let processes start their device and import compilers, without waiting for completion."""
    first.prepare(place.device)
    first.warm_up(kernels)
