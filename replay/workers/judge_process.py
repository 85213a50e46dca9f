"""The parent's side of the process that judges outputs."""

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
    """Process that judges and runs no kernel; it is started at its first request.

    Args:
        process: from `replay.workers.process.judge_process`.
    """

    def __init__(self, process: Process) -> None:
        self._shared = SharedFile()
        self.shared_file = self._shared.path
        """Path of the memory through which workers pass outputs."""
        self._process = process
        self._expecting: Iterator[dict[str, Any]] = iter(())
        """Replies to `expect` that were not read yet."""

    def expect(self, workload: Workload, settings: Settings) -> None:
        """Let it load a call while a worker does, without waiting."""
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
        """Start to end the process; `close` waits for its end."""
        self._process.end()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._shared.close()


def _class_of(kernel: str, declared: AccuracyClass) -> AccuracyClass:
    """Return the accuracy class of a kernel, from this process's registry.

    A user's code is not imported by this process: its kernel has the class declared at first.
    """
    try:
        found = find(kernel)
    except KernelNameError:  # a kernel of another environment
        return declared
    return declared if found.load is not None else found.accuracy_class


OTHER_CLOCK = 2.0
"""Largest ratio of a block's time by the parent's clock to that by the worker's."""
LATENCY_MS = 5.0
"""Time allowed for messages between the processes. On a busy machine they take longer, and the
worker then tries longer blocks."""

BESIDE_SAMPLE_MS = 50.0
BESIDE_CALL_MS = 2.0
"""Time allowed for other work of a sample, and of each of its calls, on a busy machine."""


@dataclass
class CallEvidence:
    """The parent's own observations of the kernels of one call, to compare with their rows."""

    judge: JudgeProcess
    workload: Workload
    settings: Settings
    _classes: dict[str, AccuracyClass] = field(default_factory=dict)
    _verdicts: dict[str, list[bool]] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    _announced: tuple[str, float] | None = None
    """Kernel whose warm-up or sample is under way, and the time when it began."""
    _taken_ms: dict[str, list[float]] = field(default_factory=dict)
    """Milliseconds from each announcement to the next message, by kernel."""
    _began: float = 0.0
    _blocks: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Block of each kernel: milliseconds by this clock and by the worker's, and its calls."""

    def hear(self, at: str) -> None:
        """Note the time of a message; kernels are announced before their warm-up and each sample.

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
        """Return the answer to a worker's question to the judge or to the clock."""
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
        """Return why a row contradicts the observations; empty if it does not."""
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
        """Return why samples on a CPU cannot have been as short as their row says, or nothing.

        A busy machine delays the work between calls too, which a row's times do not include. So a
        quarter of the samples without delay is enough to accept the row.
        """
        if (
            self.settings.device.type != "cpu"
            or row.time_ms is None
            or row.core_time_ms is not None
        ):
            return ""
        taken = self._taken_ms.get(row.kernel, [])[1:]  # without the warm-up
        if len(taken) < row.time_ms.n:  # not all announcements were noted
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
    """Return whether a block took equally long by this process's clock and the worker's."""
    return here_ms - LATENCY_MS <= OTHER_CLOCK * there_ms
