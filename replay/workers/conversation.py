"""The parent's conversation with one worker about one call: checks, turns, and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture.storage.json_data import shown
from capture.text.printable import printable
from replay.bench.confirmation import MOST_BLOCKS
from replay.bench.reported_stages import DONE, STAGES, TIMING
from replay.bench.runner import Loaded
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.registry import Kernel, find
from replay.rows.row import HERE, CallFacts, Machine, Row, Status, TimeSummary
from replay.rows.row_files import rebuilt
from replay.timing.statistics import summarize
from replay.workers.environment_options import WorkerError
from replay.workers.environments import Worker
from replay.workers.judge_process import QUESTIONS, CallEvidence, JudgeProcess
from replay.workers.messages import reading
from replay.workers.process import Died
from replay.workloads.workload import Workload

MAXIMUM_DEATHS = 3
"""Number of times that a kernel may end its worker, or disturb others, before it is given up."""
DISTURBS = (
    "work of this kernel's process went on while others were timed, even after the process was "
    "ended and started again"
)
"""Reason why the kernels of a worker that disturbed others are given up."""
PHASES = 2
"""Number of times that a worker requests turns: once for samples, and then for blocks."""


@dataclass(frozen=True)
class Task:
    """The replay of one call, in which several workers may share the rounds."""

    workload: Workload
    settings: Settings
    judge: JudgeProcess
    report: Callable[[str, str], None]
    """Receives the name of an environment, and of a kernel or stage there."""
    rounds: str
    """Name of the rounds, which their rows share."""
    null_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of a block without a kernel, and of the copy of its outputs, by number of calls."""
    overheads_ms: list[float] = field(default_factory=list)
    """Times by which calls of known kernels take longer in blocks than in samples."""
    loaded: dict[str, Loaded] = field(default_factory=dict)
    """Facts about the call, as workers of known kernels report them, by environment."""


class Conversation:
    """One worker's part in the replay of a call."""

    def __init__(self, worker: Worker, kernels: Sequence[Kernel], task: Task) -> None:
        self.worker = worker
        self.rounds = 0
        """Number of rounds that the worker wants to share."""
        self.baseline = ""
        self.is_waiting = False
        """True while the worker waits for a turn."""
        self.is_done = False
        """True if the worker needs no further turn."""
        self.phase = 0
        """Number of times that the worker has requested turns."""
        self._sampled = 0
        """Maximum number of samples of each kernel."""
        self._rows: dict[str, Row] = {}
        self._kernels = kernels
        self._task = task
        self._wrong: set[str] = set()
        self._evidence: CallEvidence
        self._messages: Iterator[dict[str, Any]] = iter(())
        self._loaded = Loaded(CallFacts(task.workload.name), Machine())
        self._is_timing = self._is_synchronous = False
        self._lost = {
            name: worker.last[name]
            for name, deaths in worker.deaths.items()
            if deaths >= MAXIMUM_DEATHS and name in self._rowed()
        }

    def _rowed(self) -> list[str]:
        """Return the names of the kernels that get a row from this worker.

        The worker of known kernels may add a baseline that only the call determines.
        """
        settings, worker = self._task.settings, self.worker
        special = [name for name in (settings.baseline, settings.compared_kernel) if name]
        if worker.environment != HERE:
            special = []
        here = [name for name in special if find(name).process == worker.name]
        return list(dict.fromkeys([*(kernel.name for kernel in self._kernels), *here]))

    def _control(self) -> str:
        """Return the baseline, if a user's kernels run here and it is a known kernel.

        The same kernel can differ by a tenth between two processes, because their memory and main
        threads lie elsewhere.
        """
        known = self._task.loaded.get(self.worker.environment)
        if not self.worker.name or self.worker.environment != HERE or known is None:
            return ""
        baseline = known.baseline
        return "" if not baseline or find(baseline).process else baseline

    @property
    def rows(self) -> list[Row]:
        """Rows of the worker's kernels, at most one for each."""
        return list(self._rows.values())

    @property
    def is_unreadable(self) -> bool:
        """True if the worker could not read the call, so that other workers need not try."""
        return any(not row.kernel and row.status == "error" for row in self.rows)

    def _fail(self, status: Status, reason: str, log: str = "") -> None:
        """Replace all rows by rows that state a failure.

        The worker of a user's kernels can fail only these kernels, and not the whole call.
        """
        names = self._rowed() if self.worker.name else [""]
        self._rows = {name: self._row(name, status, reason, log) for name in names}

    def begin(self) -> None:
        """Run until the worker waits for a turn or is done, restarting it after each crash."""
        self.rounds, self.is_waiting = 0, False
        if self.worker.disturbances >= MAXIMUM_DEATHS:
            return self._fail("error", DISTURBS)
        while True:
            self._rows, self.phase, self._is_timing = {}, 0, False
            try:
                self._ask()
                return self._advance()
            except Died as death:
                if not self._leave_out(death):
                    return None

    def turn(self, number: int, *, after_another: bool) -> bool:
        """Let the worker run its kernels once.

        Returns:
            False if the worker crashed and has begun again.
        """
        return self._tell(number=number, after_another=after_another)

    def finish(self) -> bool:
        """Let the worker continue after its turns; return False if it crashed and began again."""
        if not self.is_waiting:
            return True
        self.is_waiting = False
        return self._tell(end=True)

    def _tell(self, **message: Any) -> bool:
        try:
            self.worker.process.tell(**message)
            self._advance()
        except Died as death:
            if self._leave_out(death):
                self.begin()
                return False
        return True

    def _ask(self) -> None:
        task = self._task
        names = [kernel.name for kernel in self._kernels if kernel.name not in self._lost]
        options = WorkerOptions(
            in_worker=True,
            environment=self.worker.environment,
            process=self.worker.name,
            rounds=task.rounds,
            synchronous=self._is_synchronous,
            excluded=tuple(sorted(self._lost)),
            control=self._control(),
            shared_file=task.judge.shared_file,
        )
        # Ask the judge first, so that it computes the reference while the worker imports.
        task.judge.expect(task.workload, task.settings)
        self._evidence = CallEvidence(
            task.judge,
            task.workload,
            task.settings,
            self.worker.process,
            task.null_s,
            task.overheads_ms,
            self._wrong,
        )
        self._messages = self.worker.ask(
            do="replay",
            workload=task.workload.source.to_json(),
            kernels=names,
            settings=task.settings.to_json(),
            options=options.to_json(),
        )

    def _advance(self) -> None:
        """Handle messages until the worker waits for a turn or is done.

        Raises:
            Died: the worker crashed, or a kernel in it sent messages of its own.
        """
        try:
            with reading(self.worker.process):
                for message in self._messages:
                    if self._waits(message):
                        return
        except WorkerError as error:
            if not self.worker.name:
                raise
            self._fail("error", str(error))
        self.rounds, self.is_waiting = 0, False
        if "" not in self._rows:
            self._rows |= {name: self._lost_row(name) for name in self._lost}
            for name in self._rowed():
                self._rows.setdefault(name, self._row(name, "error", "its worker sent no row"))

    def _waits(self, message: dict[str, Any]) -> bool:
        """Handle one message; return whether the worker waits for a turn."""
        if "rounds" in message:
            most = MOST_BLOCKS if self.phase else self._task.settings.rounds
            self.rounds = min(message["rounds"], most)
            self._sampled = self._sampled if self.phase else self.rounds
            self.phase += 1
            if self.is_waiting or self.phase > PHASES:
                raise ValueError("a request for rounds during or after its rounds")
            self.is_waiting, self.is_done = True, False
            return True
        if "taken" in message:
            if not self.is_waiting:
                raise ValueError("the end of a turn that it did not have")
            self.is_done = message["enough"] is True
            return True
        if "call" in message:
            facts = replace(rebuilt(CallFacts, message["call"]), name=self._task.workload.name)
            baseline = message["baseline"]
            self._loaded = Loaded(facts, rebuilt(Machine, message["machine"]), baseline=baseline)
            if self.worker.name:
                self._loaded = self._task.loaded.get(self.worker.environment, self._loaded)
            else:
                self._task.loaded[self.worker.environment] = self._loaded
                self.baseline = baseline
        elif "row" in message:
            row = self._received(message["row"])
            if self.worker.name and row.kernel not in self._rowed():
                raise ValueError(f"a row of {shown(row.kernel)}")
            self._rows.setdefault(row.kernel, self._evidence.confirmed(row))
        elif "unreadable" in message:
            self._fail("error", message["unreadable"])
        elif "judge" in message:
            self.worker.process.tell(**self._evidence.answer(self._allowed(message["judge"])))
        elif "at" in message and message["at"] != DONE:
            self._is_timing = self._is_timing or message["at"] == TIMING
            self._task.report(self.worker.environment, printable(message["at"]))
        return False

    def _allowed(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's question, if the worker may ask it.

        Raises:
            ValueError: the question concerns kernels of other workers, or is unknown.
        """
        rowed = self._rowed() if self.worker.name else [question.get("kernel")]
        if question["do"] not in QUESTIONS or question.get("kernel", rowed[0]) not in rowed:
            raise ValueError(f"a question about {shown(question.get('kernel', question['do']))}")
        if question["do"] == "open" and self._task.settings.compared_kernel not in self._rowed():
            question["handed"]["tensors"] = {}
        return question

    def _leave_out(self, death: Died) -> bool:
        """Leave out the kernel that ended the worker; return False if the call itself ended it."""
        self.rounds, self.is_waiting = 0, False
        is_enqueued = self._task.settings.device.type == "cuda" and self._is_timing
        if is_enqueued and not self._is_synchronous:
            # An earlier kernel may be to blame, so try again and wait after every sample.
            self._is_synchronous = True
            return True
        is_foreign = self.worker.name and death.kernel not in self._rowed()
        if is_foreign or death.kernel in (*self._lost, *STAGES, ""):
            name = self._task.workload.name
            reason = f"{name}: {death.reason} while {printable(death.kernel) or 'starting'}"
            self._fail(death.status, reason, death.log)
            return False
        self._lost[death.kernel] = self.worker.last[death.kernel] = death
        self.worker.deaths[death.kernel] = self.worker.deaths.get(death.kernel, 0) + 1
        self._is_synchronous = True
        return True

    def _received(self, data: Any) -> Row:
        """Read a row that a worker sent; an unreadable row becomes an error row."""
        try:
            row = rebuilt(Row, data)
            times = row.time_ms
            if times and max(len(times.samples), len(times.control)) > self._sampled:
                raise ValueError("more samples than turns")
            return replace(
                row,
                reason=printable(row.reason),
                flags=tuple(map(printable, row.flags)),
                not_ranked="",
                call=self._loaded.facts,
                environment=self.worker.environment,
                process=self.worker.name,
                rounds=self._task.rounds,
                machine=self._loaded.machine,
                time_ms=None if times is None else _summary(times),
                block_ms=None,
                speedup=None,
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            reason = f"its worker sent an invalid row: {type(error).__name__}: {error}"
            kernel = str(data.get("kernel", "")) if isinstance(data, dict) else ""
            return self._row(kernel, "error", printable(reason))

    def _row(self, kernel: str, status: Status, reason: str, log: str = "") -> Row:
        return Row(
            kernel,
            self._loaded.facts,
            status,
            printable(reason),
            environment=self.worker.environment,
            process=self.worker.name,
            rounds=self._task.rounds,
            log=log,
            machine=self._loaded.machine,
        )

    def _lost_row(self, name: str) -> Row:
        death, note = self.worker.last[name], ""
        if self.worker.deaths[name] >= MAXIMUM_DEATHS:
            note = f"; not tried again, because it ended {MAXIMUM_DEATHS} workers"
        return self._row(name, death.status, death.reason + note, death.log)


def _summary(times: TimeSummary) -> TimeSummary:
    """Summarise samples again, because a worker could send a median that contradicts its samples.

    Raises:
        ValueError: there are no samples, or a sample is not a time.
    """
    if not all(0 < sample < math.inf for sample in (*times.samples, *times.control)):
        raise ValueError("a sample is not a time")
    return summarize(times.samples, times.interrupted, control=times.control)
