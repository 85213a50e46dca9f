"""The Python environments that kernels run in, and replays that use several environments.

Packages of kernels conflict, so kernels run in worker processes, which may use other interpreters.
The parent's own environment is called `this`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from capture.text.printable import printable
from replay.bench.runner import DEFAULT_BASELINE, DONE, STAGES, TIMING, Loaded
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.registry import Kernel, catalogue
from replay.rows.agreement import with_agreement
from replay.rows.row import HERE, CallFacts, Machine, Row, Status
from replay.rows.row_files import rebuilt
from replay.workers.baseline_check import without_rejected_baseline, without_slowed_baseline
from replay.workers.environment_options import WorkerError
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.process import CannotStart, Died, Process
from replay.workloads.workload import Workload

COMMON_LIBRARIES = ("torch", "triton")
"""Libraries that most environments have, whose kernels run in only one environment."""

MAXIMUM_DEATHS = 3
"""Number of workers that a kernel may end before it is given up."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Result of an environment's check of one kernel."""

    reason: str | None
    """Reason why the kernel cannot run in the environment; None if it can."""
    version: str = ""
    install: str = ""
    """Command that installs the kernel's library."""


@dataclasses.dataclass
class _Reply:
    loaded: Loaded
    rows: list[Row]
    timing: bool = False


class Environment:
    """An interpreter and its worker, with separate workers for kernels that must not share one.

    Args:
        process: the only kernel of this worker, if it runs just one kernel.
        judge: the judge of outputs; None if the worker judges outputs itself.
        worker: the first worker; None to start a worker on demand.
    """

    def __init__(
        self,
        name: str,
        python: str,
        timeout: float,
        process: str = "",
        judge: JudgeProcess | None = None,
        worker: Process | None = None,
    ) -> None:
        self.name = name
        self._judge = judge
        self._own_kernel = process
        self._process = worker or Process(python, timeout)
        self._last: dict[str, Died] = {}
        self._deaths: dict[str, int] = {}
        self._can_run: dict[str, bool] = {}
        self._disturbing: set[str] = set()
        """Kernels that changed settings or functions of the worker."""
        self._apart: dict[str, Environment] = {}
        """Separate workers with the same interpreter, keyed by the only kernel of each worker."""

    def close(self) -> None:
        self._process.close()
        for environment in self._apart.values():
            environment.close()

    def probe(self, kernels: Sequence[Kernel], device: str) -> dict[str, ProbeResult]:
        """Find out which kernels can run; a kernel that ends the worker cannot."""
        found: dict[str, ProbeResult] = {}
        while missing := [kernel.name for kernel in kernels if kernel.name not in found]:
            try:
                for message in self._ask(do="probe", kernels=missing, device=device):
                    if "probed" in message:
                        name = message.pop("probed")
                        found[name] = ProbeResult(**message)
            except Died as death:
                if not death.kernel:
                    raise self._unusable(death) from death
                found[death.kernel] = ProbeResult(
                    f"{death.status} during the check: {death.reason}"
                )
        if self._disturbing:
            self._process.close()
        return found

    def replay(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> list[Row]:
        """Return rows of the kernels on one call; a crash affects only the crashed kernel's row.

        A kernel that changed the process runs in a separate worker from then on. The other kernels
        are replayed again in a new worker.

        Every worker runs the baseline, so that speed-ups are paired within one process. The
        baseline's row comes from the first worker.

        Raises:
            WorkerError: a worker cannot start, or failed for a reason other than a kernel.
        """
        while True:
            apart = [kernel for kernel in kernels if self._wants_its_own(kernel, settings)]
            together = [kernel for kernel in kernels if kernel not in apart]
            # If no other kernels remain, only a disturbing kernel needs rows of a clean worker.
            names = {kernel.name for kernel in apart}
            if names and not together and self._disturbing.isdisjoint(names):
                rows: list[Row] = []
                break
            rows = self._replay_together(workload, together, settings, report)
            if not any(self._wants_its_own(kernel, settings) for kernel in together):
                break
            self._process.close()
        for kernel in apart:
            if _is_unreadable(rows):
                break
            found = self._worker_of(kernel)._replay_together(workload, [kernel], settings, report)
            if kernel.name in self._disturbing:
                found = [without_slowed_baseline(row, found, rows) for row in found]
            present = {row.kernel for row in rows}
            rows += [row for row in found if row.kernel not in present]
        return _in_order(rows, kernels)

    def first_calls(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> dict[str, float]:
        """Call each kernel once, in the worker that will time the kernel; return milliseconds.

        These calls compile the kernels, and nothing is judged. A kernel that ends its worker is
        left out; `replay` will report it.
        """
        apart = [kernel for kernel in kernels if self._wants_its_own(kernel, settings)]
        together = [kernel for kernel in kernels if kernel not in apart]
        found = self._first_calls_together(workload, together, settings, report)
        for kernel in apart:
            worker = self._worker_of(kernel)
            found |= worker._first_calls_together(workload, [kernel], settings, report)
        return found

    def _first_calls_together(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> dict[str, float]:
        waiting, found, disturbing = [kernel.name for kernel in kernels], {}, set(self._disturbing)
        request = {"workload": workload.source.to_json(), "settings": settings.to_json()}
        while waiting:
            try:
                for message in self._ask(do="call", kernels=waiting, **request):
                    if "at" in message:
                        report(message["at"])
                    elif "called" in message:
                        found[message["called"]] = message["first_call_ms"]
                break
            except Died as death:
                if death.kernel not in waiting:
                    break
                waiting = waiting[waiting.index(death.kernel) + 1 :]
        if self._disturbing != disturbing:
            self._process.close()
        return found

    def _ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages, and note the kernels that changed its process.

        Raises:
            WorkerError: the worker cannot start, or failed for a reason other than a kernel.
            Died: the worker crashed or hung.
        """
        try:
            for message in self._process.ask(**request):
                if "failed" in message:
                    raise WorkerError(message["failed"]) from RuntimeError(message["traceback"])
                self._disturbing.update(message.get("disturbing", ()))
                yield message
        except CannotStart as error:
            raise self._unusable(error) from error

    def start(self) -> None:
        """Start the worker without waiting until it is ready."""
        try:
            self._process.start()
        except CannotStart as error:
            raise self._unusable(error) from error

    def check(self, device: torch.device) -> None:
        """Have the worker compute something.

        Raises:
            WorkerError: the worker cannot compute.
        """
        try:
            found = self._process.answer(do="touch", device=str(device))
        except (CannotStart, Died) as error:
            raise self._unusable(error) from error
        if "works" not in found:
            raise WorkerError(f"environment {self.name} cannot use {device}: {found['failed']}")

    def works_on(self, device: torch.device) -> bool:
        """Return whether a new worker can compute anything on a device."""
        self._process.close()
        try:
            self.check(device)
        except WorkerError:
            return False
        return True

    def _wants_its_own(self, kernel: Kernel, settings: Settings) -> bool:
        """Return whether a kernel needs a separate worker.

        Baselines need no separate worker, because they run in every worker. PyTorch's kernels and
        ours need none, because changes by their compilers are undone. Kernels that cannot run get
        no worker.
        """
        if kernel.name in _in_every_worker(settings):
            return False
        if kernel.name in self._disturbing and kernel.library not in COMMON_LIBRARIES:
            return True
        if not kernel.own_process:
            return False
        if kernel.name not in self._can_run:
            found = self.probe([kernel], str(settings.device))
            self._can_run[kernel.name] = found[kernel.name].reason is None
        return self._can_run[kernel.name]

    def _worker_of(self, kernel: Kernel) -> Environment:
        if kernel.name not in self._apart:
            process = self._process.another()
            self._apart[kernel.name] = Environment(
                self.name, process.python, process.timeout, kernel.name, self._judge, process
            )
        return self._apart[kernel.name]

    def _replay_together(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> list[Row]:
        """Return rows of kernels that share this worker, restarting it after each crash."""
        given_up = {name for name, deaths in self._deaths.items() if deaths >= MAXIMUM_DEATHS}
        asked = [kernel.name for kernel in kernels]
        rowed = (*asked, settings.baseline, settings.compared_kernel)
        lost = {name: self._last[name] for name in rowed if name in given_up}
        loaded = Loaded(CallFacts(workload.name), Machine())
        synchronous = False
        while True:
            names = [name for name in asked if name not in lost]
            options = self._options(synchronous, {*lost, *given_up})
            reply = _Reply(loaded, [])
            try:
                self._replay_once(workload, names, settings, options, report, reply)
            except Died as death:
                loaded = reply.loaded
                if settings.device.type == "cuda" and reply.timing and not synchronous:
                    # Samples are only enqueued, so any earlier kernel may be to blame. Retry with
                    # one sample at a time.
                    synchronous = True
                elif death.kernel in (*lost, *STAGES, ""):
                    # No kernel can be left out: the call itself ends the worker.
                    reason = f"{workload.name}: {death.reason} while {death.kernel or 'starting'}"
                    return [self._row("", loaded, death.status, reason, death.log)]
                else:
                    lost[death.kernel] = self._last[death.kernel] = death
                    self._deaths[death.kernel] = self._deaths.get(death.kernel, 0) + 1
                    synchronous = True
                continue
            rows = reply.rows
            if all(row.kernel for row in rows):
                rows += [self._lost_row(name, reply.loaded) for name in lost]
            return _in_order(rows, kernels)

    def _replay_once(
        self,
        workload: Workload,
        names: list[str],
        settings: Settings,
        options: WorkerOptions,
        report: Callable[[str], None],
        reply: _Reply,
    ) -> None:
        request = {
            "workload": workload.source.to_json(),
            "kernels": names,
            "settings": settings.to_json(),
            "options": options.to_json(),
        }
        evidence, rejected = None, set()
        if self._judge is not None:
            # Ask the judge first, so that it computes the reference while the worker imports.
            self._judge.expect(workload, settings)
            evidence = CallEvidence(self._judge, workload, settings)
        for message in self._ask(do="replay", **request):
            if evidence is not None:
                evidence.hear(message.get("at", ""))
            if "call" in message:
                facts = rebuilt(CallFacts, message["call"])
                reply.loaded = Loaded(facts, rebuilt(Machine, message["machine"]))
            elif "row" in message:
                row = self._received(message["row"], reply.loaded)
                why_rejected = "" if evidence is None else evidence.why_rejected(row)
                if why_rejected:
                    row = self._row(row.kernel, reply.loaded, "error", why_rejected)
                    rejected.add(row.kernel)
                reply.rows.append(row)
            elif "unreadable" in message:
                reply.rows = [self._row("", reply.loaded, "error", message["unreadable"])]
            elif "judge" in message and evidence is not None:
                self._process.tell(**evidence.answer(message["judge"]))
            elif "at" in message and message["at"] != DONE:
                reply.timing = reply.timing or message["at"] == TIMING
                report(message["at"])
        reply.rows = [without_rejected_baseline(row, rejected) for row in reply.rows]

    def _options(self, synchronous: bool, excluded: set[str]) -> WorkerOptions:
        if self._own_kernel:  # other kernels with separate workers are excluded
            others = {each.name for each in catalogue().values() if each.own_process}
            excluded = excluded | (others - {self._own_kernel})
        return WorkerOptions(
            in_worker=True,
            environment=self.name,
            process=self._own_kernel,
            synchronous=synchronous,
            excluded=tuple(sorted(excluded)),
            shared_file="" if self._judge is None else self._judge.shared_file,
        )

    def _received(self, data: Any, loaded: Loaded) -> Row:
        """Read a row that a worker sent; an unreadable row becomes an error row."""
        try:
            return rebuilt(Row, data)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            reason = f"its worker sent an invalid row: {type(error).__name__}: {error}"
            kernel = str(data.get("kernel", "")) if isinstance(data, dict) else ""
            return self._row(kernel, loaded, "error", printable(reason))

    def _row(self, kernel: str, loaded: Loaded, status: Status, reason: str, log: str = "") -> Row:
        return Row(
            kernel,
            loaded.facts,
            status,
            reason,
            environment=self.name,
            process=self._own_kernel,
            log=log,
            machine=loaded.machine,
        )

    def _lost_row(self, name: str, loaded: Loaded) -> Row:
        death = self._last[name]
        note = ""
        if self._deaths[name] >= MAXIMUM_DEATHS:
            note = f"; not tried again, because it ended {MAXIMUM_DEATHS} workers"
        return self._row(name, loaded, death.status, death.reason + note, death.log)

    def _unusable(self, error: CannotStart | Died) -> WorkerError:
        return WorkerError(
            f"environment {self.name} ({self._process.python}) does not work: {error}; "
            "it needs torch and safetensors"
        )


def _in_every_worker(settings: Settings) -> set[str]:
    return {settings.baseline or DEFAULT_BASELINE, settings.compared_kernel or ""}


def _in_order(rows: list[Row], kernels: Sequence[Kernel]) -> list[Row]:
    """Sort rows in the order of their kernels; rows of added baselines come last."""
    order = {kernel.name: place for place, kernel in enumerate(kernels)}
    return sorted(rows, key=lambda row: order.get(row.kernel, len(order)))


def _is_unreadable(rows: list[Row]) -> bool:
    """Return whether the call could not be read, so that no other worker can read it."""
    return any(not row.kernel and row.status == "error" for row in rows)


def replay_in_workers(
    workloads: Iterable[Workload],
    kernels: dict[str, list[Kernel]],
    settings: Settings,
    environments: dict[str, Environment],
    on_progress: Callable[[Workload, str], None] | None = None,
) -> Iterator[Row]:
    """Yield the rows of `replay.bench.runner.replay_here`, with a worker for each environment.

    Every environment runs the baseline too, so that speed-ups are paired within one process.
    """
    for workload in workloads:
        found: list[Row] = []
        for name, environment in environments.items():
            if not kernels.get(name):
                continue

            def report(stage: str, workload: Workload = workload, name: str = name) -> None:
                if on_progress is not None:
                    on_progress(workload, stage if name == HERE else f"{stage} in {name}")

            rows = environment.replay(workload, kernels[name], settings, report)
            found += rows
            if _is_unreadable(rows):
                break
        if on_progress is not None:
            on_progress(workload, DONE)
        yield from with_agreement(found)


def assign(
    kernels: Sequence[Kernel], found: dict[str, dict[str, ProbeResult]]
) -> dict[str, list[Kernel]]:
    """Assign kernels to environments.

    A kernel runs in every environment that has its library. PyTorch's kernels and ours run only in
    the first environment that can run them, because most environments could. A kernel that cannot
    run in any environment gets a row with the reason in the first environment.

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
