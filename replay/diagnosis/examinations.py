"""Examination of kernels on recorded calls, each kernel in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from attention_replay.errors import Error
from capture.call.attention_call import Origin
from replay.bench.runner import BEYOND_SDPA, DEFAULT_BASELINE
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.diagnosis import REMEDIES, Diagnosis, diagnosed
from replay.diagnosis.diagnosis_text import paragraphs
from replay.diagnosis.examine import failure
from replay.diagnosis.hypotheses.stale import kept_from_earlier_calls
from replay.diagnosis.server import serve
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel, find
from replay.rows.row_files import rebuilt
from replay.workers.process import Died, Process
from replay.workloads.workload import Workload

HEALTHY = (DEFAULT_BASELINE, "torch-efficient", "torch-math", *BEYOND_SDPA)
"""Kernels tried as replacements, after the requested kernels."""

Progress = Callable[[Workload, str], None]


class DoctorError(Error):
    """Reason why kernels cannot be examined."""


@dataclass
class Diagnoses:
    """Diagnoses from one run of the doctor, and the number of examinations."""

    found: list[Diagnosis] = field(default_factory=list)
    examined: int = 0
    """Number of examined pairs of kernel and call."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason for each kernel's first refusal of a call, by kernel."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why a call could not be read, by call."""
    right: dict[str, list[str]] = field(default_factory=dict)
    """Names of the correct kernels, by call."""
    note: str = ""
    """Warning about how the recording was read; usually empty."""

    @property
    def left_out(self) -> list[str]:
        """Sentences about refusals and unreadable calls, and about how the recording was read."""
        sentences = [self.note] if self.note else []
        sentences += [
            f"{kernel} does not run every call: {reason}" for kernel, reason in self.refused.items()
        ]
        sentences += [
            f"{reason}; the other calls were examined" for reason in self.unreadable.values()
        ]
        return sentences

    def add(self, call: str, kernel: str, diagnosis: Diagnosis | None, refused: str = "") -> None:
        """Add the result of examining a kernel on a call."""
        if refused:
            self.refused.setdefault(kernel, refused)
            return
        self.examined += 1
        if diagnosis is None:
            self.right.setdefault(call, []).append(kernel)
        else:
            self.found.append(diagnosis)

    def __str__(self) -> str:
        """Return the text that `replay doctor` prints: a paragraph for each kernel and cause."""
        return "\n".join(paragraphs(self.found, self.examined))


def diagnose(
    workloads: Sequence[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    timeout: float = 300.0,
    report: Progress = lambda workload, stage: None,
    *,
    in_process: bool = False,
    found: Diagnoses | None = None,
) -> Diagnoses:
    """Examine kernels on calls, and name a replacement for each wrong kernel.

    Args:
        timeout: seconds without a message after which a kernel's process is killed.
        in_process: run the kernels in this process; a crashing kernel then ends the process.
        found: receives every result immediately, for callers who may be interrupted.
    """
    found = Diagnoses() if found is None else found
    examiner = Examiner(settings, None if in_process else timeout)
    try:
        for kernel in kernels:
            for workload in workloads:
                if workload.name in found.unreadable:
                    continue
                report(workload, kernel.name)
                examiner.examine(kernel, workload, found)
            examiner.close()
        by_name = {workload.name: workload for workload in workloads}
        for name in dict.fromkeys(each.call for each in found.found):
            report(by_name[name], "another kernel")
            _name_another(found, by_name[name], examiner)
        return found
    finally:
        examiner.close()


def _name_another(found: Diagnoses, workload: Workload, examiner: Examiner) -> None:
    """Write the name of a replacement into each diagnosis of a call."""
    name = workload.name
    wrong = {each.kernel for each in found.found if each.call == name}
    anywhere = {each.kernel for each in found.found}
    right = [each for each in found.right.get(name, []) if each not in (CAPTURED.name, *anywhere)]
    if not right:
        right = [examiner.healthy([each for each in HEALTHY if each not in wrong], workload)]
    for at, each in enumerate(found.found):
        if each.call == name:
            named = f"{right[0]}, which is right on this call" if right[0] else ""
            ways = "; or ".join(filter(None, (named, REMEDIES[each.cause])))
            found.found[at] = replace(each, instead=ways)


class _Answer(NamedTuple):
    """Result of one kernel on one call."""

    origin: Origin = Origin()
    diagnosis: Diagnosis | None = None
    refused: str = ""
    unreadable: str = ""
    died: bool = False


class Examiner:
    """Examines kernels in this process, or in child processes.

    Each kernel has a child process, and a new one after each crash. A kernel that is wrong after
    other calls is examined again on that call alone, in a new process. The kernel has no state from
    earlier calls there, so an error must have another cause.

    Args:
        timeout: seconds without a message after which a child is killed; None to use this process.
    """

    def __init__(self, settings: Settings, timeout: float | None) -> None:
        self._settings = settings
        self._processes: list[Process] = []
        if timeout is None:
            with torch.no_grad():
                self._process_state = ProcessState()
        else:
            self._processes = [
                Process(sys.executable, timeout, "replay.diagnosis.server") for _ in range(2)
            ]
        self._calls = 0  # number of calls examined by the current process

    def examine(self, kernel: Kernel, workload: Workload, found: Diagnoses) -> None:
        """Examine a kernel on a call, and add the result to `found`."""
        calls = self._calls
        answer = self._answer(kernel, workload)
        self._calls = 0 if answer.died else calls + 1
        if answer.unreadable:
            found.unreadable[workload.name] = answer.unreadable
            return
        diagnosis = answer.diagnosis
        if diagnosis is not None and calls and self._processes:
            again = self._answer(kernel, workload, is_alone=True).diagnosis
            if again is None:
                evidence = kept_from_earlier_calls(calls, diagnosis.sentence)
                again = diagnosed(workload.name, kernel.name, answer.origin, evidence)
            diagnosis = again
        found.add(workload.name, kernel.name, diagnosis, answer.refused)

    def _answer(self, kernel: Kernel, workload: Workload, *, is_alone: bool = False) -> _Answer:
        origin, answer = Origin(), _Answer()
        try:
            for message in self._ask("examine", [kernel], workload, is_alone=is_alone):
                if "origin" in message:
                    origin = Origin(**message["origin"])
                elif "unreadable" in message:
                    answer = _Answer(unreadable=message["unreadable"])
                elif "examined" in message:
                    given = message["examined"]
                    diagnosis = None if given is None else rebuilt(Diagnosis, given)
                    answer = _Answer(origin, diagnosis, message["refused"])
        except Died as death:
            evidence = failure(death.status, str(death))
            return _Answer(
                origin, diagnosed(workload.name, kernel.name, origin, evidence), died=True
            )
        return answer

    def healthy(self, names: Sequence[str], workload: Workload) -> str:
        """Return the name of the first kernel that is correct on a call; empty if none is."""
        left = list(names)
        while left:
            try:
                kernels = [find(name) for name in left]
                messages = list(self._ask("find healthy", kernels, workload))
                return next((each["healthy"] for each in messages if "healthy" in each), "")
            except Died as death:
                left = left[left.index(death.kernel) + 1 :] if death.kernel in left else []
        return ""

    def _ask(
        self, do: str, kernels: Sequence[Kernel], workload: Workload, *, is_alone: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the messages of `replay.diagnosis.server`."""
        if not self._processes:
            messages: list[dict[str, Any]] = []

            def say(**message: Any) -> None:
                messages.append(message)

            serve(do, kernels, workload, self._settings, self._process_state, say)
            yield from messages
            return
        process = self._processes[is_alone]
        try:
            for message in process.ask(
                do=do,
                kernels=[kernel.name for kernel in kernels],
                workload=workload.source.to_json(),
                settings=self._settings.to_json(),
            ):
                if "failed" in message:
                    raise DoctorError(message["failed"]) from RuntimeError(message["traceback"])
                yield message
        finally:
            if is_alone:
                process.close()

    def close(self) -> None:
        """End the child processes; the next kernel gets new ones."""
        for process in self._processes:
            process.close()
        self._calls = 0
