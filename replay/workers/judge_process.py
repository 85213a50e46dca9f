"""The parent's access to the process that judges outputs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from capture.text.counted import counted
from replay.bench.runner import TIMING
from replay.bench.settings import Settings
from replay.isolation.judge import JUDGED_SAMPLES, OTHER_TIMER
from replay.kernels.registry import KernelNameError, find
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import Row
from replay.timing.timer import calls_of_cpu_sample
from replay.workers.process import Process
from replay.workers.shared_memory import SharedFile
from replay.workloads.workload import Workload


class JudgeProcess:
    """Process that judges outputs and runs no kernel, started at the first request.

    Args:
        process: the result of `replay.workers.process.judge_process`.
    """

    def __init__(self, process: Process) -> None:
        self._shared = SharedFile()
        self.shared_file = self._shared.path
        """Path of the file in memory through which workers pass outputs."""
        self._process = process
        self._expecting: Iterator[dict[str, Any]] = iter(())
        """Replies to `expect` that are still unread."""

    def expect(self, workload: Workload, settings: Settings) -> None:
        """Let the process load a call while a worker loads the same call; do not wait."""
        self._finish_expecting()
        self._expecting = self._process.ask(
            do="expect", workload=workload.source.to_json(), settings=settings.to_json()
        )
        next(self._expecting)

    def answer(
        self, question: dict[str, Any], workload: Workload, settings: Settings
    ) -> dict[str, Any]:
        """Return the judge's answer to a worker's question."""
        self._finish_expecting()
        if question["do"] == "open":
            question = {**question, "workload": workload.source.to_json()}
        return self._process.answer(**question, settings=settings.to_json())

    def _finish_expecting(self) -> None:
        for _ in self._expecting:
            pass

    def end(self) -> None:
        """Request the end of the process; `close` waits for the end."""
        self._process.end()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._shared.close()


def _class_of(kernel: str, declared: AccuracyClass) -> AccuracyClass:
    """Return the accuracy class of a kernel, from this process's registry.

    This process does not import a user's code, so a user's kernel keeps the first declared class.
    """
    try:
        found = find(kernel)
    except KernelNameError:  # a kernel from another environment
        return declared
    return declared if found.load is not None else found.accuracy_class


OTHER_CLOCK = 2.0
"""Largest ratio of a block's time by the parent's clock to its time by the worker's clock."""
LATENCY_MS = 5.0
"""Time allowed for messages between the processes. If messages on a busy machine take longer, the
worker tries longer blocks of calls."""

BESIDE_SAMPLE_MS = 50.0
BESIDE_CALL_MS = 2.0
"""Time allowed for other work on a busy machine, per sample and per call of a sample."""


@dataclass
class CallEvidence:
    """The parent's own observations of kernels on one call, to compare with the kernels' rows."""

    judge: JudgeProcess
    workload: Workload
    settings: Settings
    _classes: dict[str, AccuracyClass] = field(default_factory=dict)
    _verdicts: dict[str, list[bool]] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    _announced: tuple[str, float] | None = None
    """Kernel of the current warm-up or sample, and the time when the warm-up or sample began."""
    _taken_ms: dict[str, list[float]] = field(default_factory=dict)
    """Milliseconds from each announcement of a kernel to the next message, keyed by kernel."""
    _began: float = 0.0
    _blocks: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Block of calls of each kernel: milliseconds by this process's clock and the worker's clock,
    and number of calls."""

    def hear(self, at: str) -> None:
        """Note the time of a message; each warm-up and sample of a kernel is announced.

        Args:
            at: the announced kernel or stage; empty in other messages.
        """
        now = time.perf_counter()
        if self._announced is not None:
            kernel, since = self._announced
            self._taken_ms.setdefault(kernel, []).append((now - since) * 1000)
        if at == TIMING:
            self._taken_ms.clear()
        self._announced = (at, now) if at else None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a worker's request to the judge or to the clock."""
        kernel = question.get("kernel", "")
        if question["do"] == "start clock":
            self._began = time.perf_counter()
            return {}
        if question["do"] == "stop clock":
            milliseconds = (time.perf_counter() - self._began) * 1000
            self._blocks[kernel] = milliseconds, question["block_ms"], question["calls"]
            return {"agree": _agree(milliseconds, question["block_ms"])}
        if "accuracy_class" in question:
            if kernel not in self._classes:
                self._classes[kernel] = _class_of(kernel, question["accuracy_class"])
            question = {**question, "accuracy_class": self._classes[kernel]}
        found = self.judge.answer(question, self.workload, self.settings)
        if "wrong" in found:
            self._verdicts.setdefault(kernel, []).append(not found["wrong"])
            timed = sum(not is_stepped for *_, is_stepped in question["numbers"])
            self._samples[kernel] = self._samples.get(kernel, 0) + timed
        elif "judged" in found and not question["of_core"]:
            status = found["judged"]["finding"][0]
            self._verdicts.setdefault(kernel, []).append(status == "ok")
        return found

    def why_rejected(self, row: Row) -> str:
        """Return why a row contradicts the observations; empty if the row agrees with them."""
        if not row.is_correct:
            return ""
        verdicts = self._verdicts.get(row.kernel, [])
        if not verdicts or not all(verdicts):
            return "its row says that it is right, and the judge does not"
        judged_as = self._classes[row.kernel]
        if row.accuracy_class != judged_as:
            return f"its row says that it is {row.accuracy_class}, and it was judged as {judged_as}"
        if row.time_ms is None:
            return ""
        wanted, judged = min(JUDGED_SAMPLES, row.time_ms.n), self._samples.get(row.kernel, 0)
        if judged < wanted:
            return f"the judge got {judged} of {wanted} timed samples: something changed the timer"
        if wrong := self._wrong_time(row):
            return wrong
        if row.kernel not in self._blocks:
            return ""
        parent_ms, worker_ms, calls = self._blocks[row.kernel]
        if not _agree(parent_ms, worker_ms):
            return (
                f"{counted(calls, 'call')} took {worker_ms:.3g} ms by the worker's clock and "
                f"{parent_ms:.3g} ms by another process's: something changed the clock"
            )
        reported = row.time_ms.p50 + (row.host_ms or 0.0)
        if self.settings.device.type == "cuda" and worker_ms / calls > OTHER_TIMER * reported:
            return (
                f"its row says {reported:.3g} ms a call, and in a block of them one took "
                f"{worker_ms / calls:.3g} ms: something changed the timer"
            )
        return ""

    def _wrong_time(self, row: Row) -> str:
        """Return why CPU samples took longer than their row states; empty if the times agree.

        A busy machine also delays the work between calls, which the row's times exclude. So a row
        is accepted if a quarter of its samples were not delayed.
        """
        if (
            self.settings.device.type != "cpu"
            or row.time_ms is None
            or row.core_time_ms is not None
        ):
            return ""
        taken = self._taken_ms.get(row.kernel, [])[1:]  # leave out the warm-up
        if len(taken) < row.time_ms.n:  # some announcements are missing
            return ""
        call_ms, found = row.time_ms.p50, sorted(taken)[len(taken) // 4]
        calls = calls_of_cpu_sample(call_ms)
        beside = BESIDE_SAMPLE_MS + calls * BESIDE_CALL_MS
        if found - beside <= OTHER_TIMER * calls * call_ms:
            return ""
        return (
            f"its row says {call_ms:.3g} ms a call, and a sample of {counted(calls, 'call')} took "
            f"{found:.3g} ms by another process's clock: something changed the timer"
        )


def _agree(here_ms: float, there_ms: float) -> bool:
    """Return whether a block's time by this process's clock fits its time by the worker's clock."""
    return here_ms - LATENCY_MS <= OTHER_CLOCK * there_ms
