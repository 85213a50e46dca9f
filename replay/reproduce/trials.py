"""Trials of a kernel on a call: the kernel runs in a worker and is judged outside of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from replay.bench.confirmation import MOST_BLOCKS
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.failures import without_numbers
from replay.reproduce.crop import storable
from replay.rows.errors_of_output import AccuracyClass, Where
from replay.rows.row import Row, Status
from replay.rows.row_files import rebuilt
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.messages import reading
from replay.workers.process import CannotStart, Died, Process, judge_process
from replay.workloads.recorded import recorded_call
from replay.workloads.workload import Workload

FAILURES = ("inaccurate", "error", "crash", "timeout")
"""Statuses that count as failures of a kernel."""


class TrialError(Error):
    """Reason why a kernel could not be run."""


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of running a kernel on a call."""

    status: Status
    reason: str
    accuracy_class: AccuracyClass = "exact"
    where: Where | None = None
    """Place of the largest errors, if the kernel returned an output."""
    worst_row: tuple[int, int, int] | None = None
    """Indices of the worst row: batch element, head and query."""
    is_finite: bool = True
    """False if only one of output and reference has a NaN or an infinity somewhere."""

    @classmethod
    def of(cls, row: Row) -> TrialOutcome:
        """Return the outcome that a row of a replay contains."""
        found = cls(row.status, row.reason, row.accuracy_class or "exact")
        if row.accuracy is None:
            return found
        errors = row.accuracy.chosen or row.accuracy.reference
        return replace(
            found,
            where=row.accuracy.where,
            worst_row=errors.worst_row,
            is_finite=not errors.mismatched_nonfinite,
        )

    @property
    def fails(self) -> bool:
        return self.status in FAILURES

    def is_like(self, other: TrialOutcome) -> bool:
        """Return True if both failures are of one kind.

        The kinds are wrong numbers, NaN or infinity, each exception, a crash and a hang.
        """
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[Status, str, bool]:
        exception = without_numbers(self.reason) if self.status == "error" else ""
        return self.status, exception, self.is_finite


class Trials:
    """Trials of one kernel; its worker and its judge end with the `with` block.

    Args:
        settings: settings of the replay that runs only this kernel.
        timeout: seconds after which the kernel counts as hanging.
        scratch: directory for the files of calls.
        python: interpreter of the worker.
    """

    def __init__(
        self, kernel: str, settings: Settings, timeout: float, scratch: Path, python: str
    ) -> None:
        self._kernel = kernel
        self._settings = replace(settings, baseline=kernel)
        self._worker = Process(python, timeout)
        self._judge = JudgeProcess(judge_process(timeout, self._worker.place))
        self._path = scratch / "trial.safetensors"

    def __enter__(self) -> Trials:
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self._judge.close()

    def on(self, call: AttentionCall) -> TrialOutcome:
        """Run the kernel on a call.

        Raises:
            TrialError: a process does not start, or the call cannot be used.
        """
        return self.of(recorded_call(PackedCall.of(storable(call)).write(self._path)))

    def of(self, workload: Workload) -> TrialOutcome:
        """Run the kernel on a recorded call.

        Raises:
            TrialError: a process does not start, or the call cannot be used.
        """
        evidence = CallEvidence(self._judge, workload, self._settings, self._worker, {})
        rows: list[Row] = []
        turns: list[dict[str, int]] = []
        try:
            # The judge computes the reference while the worker starts.
            self._judge.expect(workload, self._settings)
            options = WorkerOptions(in_worker=True, shared_file=self._judge.shared_file)
            for message in self._worker.ask(
                do="replay",
                workload=workload.source.to_json(),
                kernels=[self._kernel],
                settings=self._settings.to_json(),
                options=options.to_json(),
            ):
                if "row" in message:
                    with reading(self._worker):
                        rows.append(evidence.confirmed(rebuilt(Row, message["row"])))
                elif "rounds" in message or "taken" in message:
                    wanted = min(message.get("rounds", 0), max(MOST_BLOCKS, self._settings.rounds))
                    turns += [{"number": number} for number in range(wanted)]
                    self._worker.tell(**(turns.pop(0) if turns else {}))
                elif "judge" in message:
                    with reading(self._worker):
                        answer = evidence.answer(message["judge"])
                    self._worker.tell(**answer)
                elif reason := message.get("unreadable") or message.get("failed"):
                    raise TrialError(reason)
        except CannotStart as error:
            raise TrialError(f"{self._worker.python} does not work: {error}") from error
        except Died as death:
            if death.kernel != self._kernel:
                doing = death.kernel or "starting"
                raise TrialError(f"{workload.name}: {death.reason} while {doing}") from death
            return TrialOutcome(death.status, death.reason)
        for row in rows:
            if row.kernel == self._kernel:
                return TrialOutcome.of(row)
            if not row.kernel:  # the row is about the call itself, which the message names
                raise TrialError(row.reason)
        raise TrialError(f"{workload.name}: no row came back")
