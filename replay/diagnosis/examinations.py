"""Examination of kernels on recorded calls, each kernel in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from attention_replay.errors import Error
from capture.call.attention_call import Origin
from capture.errors import DatasetError
from replay.bench.runner import BEYOND_SDPA, DEFAULT_BASELINE
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.diagnosis import REMEDIES, Diagnosis, diagnosed
from replay.diagnosis.diagnosis_text import paragraphs
from replay.diagnosis.examine import examine, failure
from replay.diagnosis.hypotheses.stale import kept_from_earlier_calls
from replay.diagnosis.server import healthy
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel
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
    """Reason of each kernel for refusing a call; only its first refusal is kept."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why a call could not be read, by call."""
    right: dict[str, list[str]] = field(default_factory=dict)
    """Names of the correct kernels, by call."""
    note: str = ""
    """Warning about how the recording was read; usually empty."""

    @property
    def left_out(self) -> list[str]:
        """Sentences about what was not examined, and about how the recording was read."""
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
        """Return a paragraph for each kernel and cause, as `replay doctor` prints them."""
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
        in_process: run the kernels in this process, which a crashing kernel ends.
        found: receives every result immediately, for callers who may be interrupted.
    """
    found = Diagnoses() if found is None else found
    examiner: _InThisProcess | _Processes = (
        _InThisProcess(settings) if in_process else _Processes(settings, timeout)
    )
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


def _name_another(
    found: Diagnoses, workload: Workload, examiner: _InThisProcess | _Processes
) -> None:
    """Write the name of a replacement into each diagnosis of a call."""
    name = workload.name
    wrong = {each.kernel for each in found.found if each.call == name}
    anywhere = {each.kernel for each in found.found}
    right = [each for each in found.right.get(name, []) if each not in (CAPTURED.name, *anywhere)]
    if not right:
        right = [examiner.healthy([each for each in HEALTHY if each not in wrong], workload)]
    for at, each in enumerate(found.found):
        if each.call == name:
            found.found[at] = replace(each, instead=_instead(right[0], REMEDIES[each.cause]))


def _instead(kernel: str, remedy: str) -> str:
    named = f"{kernel}, which is right on this call" if kernel else ""
    return "; or ".join(filter(None, (named, remedy)))


class _InThisProcess:
    """Examiner that runs everything in this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with torch.no_grad():
            self._process_state = ProcessState()

    def examine(self, kernel: Kernel, workload: Workload, found: Diagnoses) -> None:
        """Examine a kernel on a call, and add the result to `found`."""
        with torch.no_grad():
            try:
                call = workload.load_to_judge(self._settings.device)
            except DatasetError as error:
                found.unreadable[workload.name] = str(error)
                return
            examined = examine(kernel, call, self._settings, self._process_state)
        diagnosis = None
        if examined.evidence is not None:
            diagnosis = diagnosed(workload.name, kernel.name, call.origin, examined.evidence)
        found.add(workload.name, kernel.name, diagnosis, examined.refused)

    def healthy(self, names: Sequence[str], workload: Workload) -> str:
        """Return the first named kernel that is correct on a call; empty if none is."""
        with torch.no_grad():
            return healthy(
                names, workload.load(self._settings.device), self._settings, self._process_state
            )

    def close(self) -> None:
        """Do nothing, because there is no process to close."""


class _Answer(NamedTuple):
    """Reply of a process about one kernel on one call."""

    origin: Origin = Origin()
    diagnosis: Diagnosis | None = None
    refused: str = ""
    unreadable: str = ""
    died: bool = False


class _Processes:
    """Examiner with a process for each kernel, and a new one after each death.

    A kernel that is wrong after other calls is examined again in a new process, where that call is
    the only one. The kernel has no state from earlier calls there, so other causes show by
    themselves.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self._settings = settings
        self._process, self._alone = (
            Process(sys.executable, timeout, "replay.diagnosis.server") for _ in range(2)
        )
        self._calls = 0  # number of calls examined by the current process

    def examine(self, kernel: Kernel, workload: Workload, found: Diagnoses) -> None:
        """Examine a kernel on a call, and add the result to `found`."""
        calls = self._calls
        answer = self._answer(self._process, kernel.name, workload)
        self._calls = 0 if answer.died else calls + 1
        if answer.unreadable:
            found.unreadable[workload.name] = answer.unreadable
            return
        diagnosis = answer.diagnosis
        if answer.diagnosis is not None and calls > 0:
            diagnosis = self._answer(self._alone, kernel.name, workload).diagnosis
            self._alone.close()
            if diagnosis is None:
                evidence = kept_from_earlier_calls(calls, answer.diagnosis.sentence)
                diagnosis = diagnosed(workload.name, kernel.name, answer.origin, evidence)
        found.add(workload.name, kernel.name, diagnosis, answer.refused)

    def _answer(self, process: Process, kernel: str, workload: Workload) -> _Answer:
        origin, name, answer = Origin(), workload.name, _Answer()
        try:
            for message in self._ask(process, "examine", workload, kernel=kernel, name=name):
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
            return _Answer(origin, diagnosed(name, kernel, origin, evidence), died=True)
        return answer

    def healthy(self, names: Sequence[str], workload: Workload) -> str:
        left = list(names)
        while left:
            try:
                for message in self._ask(self._process, "find healthy", workload, kernels=left):
                    if "healthy" in message:
                        return str(message["healthy"])
            except Died as death:
                left = left[left.index(death.kernel) + 1 :] if death.kernel in left else []
        return ""

    def _ask(
        self, process: Process, do: str, workload: Workload, **request: object
    ) -> Iterator[dict[str, Any]]:
        settings = self._settings.to_json()
        source = workload.source.to_json()
        for message in process.ask(do=do, workload=source, settings=settings, **request):
            if "failed" in message:
                raise DoctorError(message["failed"]) from RuntimeError(message["traceback"])
            yield message

    def close(self) -> None:
        self._process.close()
        self._alone.close()
        self._calls = 0
