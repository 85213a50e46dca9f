"""Examination of kernels on recorded calls, each kernel in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from attention_replay.errors import Error
from capture.call.attention_call import Origin
from capture.storage.json_data import shown
from replay.bench.runner import BEYOND_SDPA
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.diagnosis import (
    NONFINITE_INPUT,
    REMEDIES,
    Diagnosis,
    diagnosed,
    way_to_fail,
)
from replay.diagnosis.diagnosis_text import paragraphs
from replay.diagnosis.examine import failure
from replay.diagnosis.hypotheses.stale import kept_from_earlier_calls
from replay.diagnosis.modes import WHERE, Mode
from replay.diagnosis.server import serve
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel, find
from replay.rows.row import DEFAULT_BASELINE
from replay.rows.row_files import rebuilt
from replay.workers.messages import reading
from replay.workers.process import Died, Process
from replay.workloads.workload import Workload

HEALTHY = (DEFAULT_BASELINE, "torch-efficient", "torch-math", *BEYOND_SDPA)
"""Kernels tried as replacements, after the requested kernels."""

REPETITIONS = 3
"""Number of times that a call must be right in a new process, so that it is not so by chance."""

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
    untried: dict[tuple[str, Mode], str] = field(default_factory=dict)
    """Reason why a kernel could not be examined in a mode on a call, by kernel and mode."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why a call could not be read, by call."""
    right: dict[str, list[str]] = field(default_factory=dict)
    """Names of the correct kernels, by call."""
    note: str = ""
    """Warning about how the recording was read; usually empty."""
    first_nonfinite: str = ""
    """Place at which values of the recorded run stop being finite; empty if unknown."""
    tell: Callable[[Diagnosis], None] = field(default=lambda diagnosis: None, repr=False)
    """Function that receives each diagnosis as it is made, before a replacement is known."""

    @property
    def wrong(self) -> list[Diagnosis]:
        """Diagnoses of kernels that are wrong."""
        return [each for each in self.found if each.is_wrong]

    @property
    def left_out(self) -> list[str]:
        """Sentences about refusals and unreadable calls, and about how the recording was read."""
        sentences = [self.note] if self.note else []
        sentences += [
            f"{kernel} does not run every call: {reason}" for kernel, reason in self.refused.items()
        ]
        sentences += [
            f"{kernel} was not tried {WHERE[mode]} on some calls: {reason}"
            for (kernel, mode), reason in self.untried.items()
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
            self.tell(diagnosis)

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
    inside: Sequence[Mode] = (),
    found: Diagnoses | None = None,
) -> Diagnoses:
    """Examine kernels on calls, and name a replacement for each wrong kernel.

    Args:
        timeout: seconds without a message after which a kernel's process is killed.
        in_process: run the kernels in this process; a crashing kernel then ends the process.
        inside: modes for kernels that are right in eager mode (`chosen_modes`).
        found: receives every result immediately, for callers who may be interrupted.
    """
    found = Diagnoses() if found is None else found
    examiner = Examiner(settings, None if in_process else timeout, inside)
    try:
        for kernel in kernels:
            for workload in workloads:
                if workload.name in found.unreadable:
                    continue
                report(workload, kernel.name)
                examiner.examine(kernel, workload, found)
            examiner.close()
        by_name = {workload.name: workload for workload in workloads}
        for name in dict.fromkeys(each.call for each in found.wrong):
            report(by_name[name], "another kernel")
            _name_another(found, by_name[name], examiner)
        return found
    finally:
        examiner.close()


def _name_another(found: Diagnoses, workload: Workload, examiner: Examiner) -> None:
    """Write the name of a replacement, or another remedy, into each diagnosis of a call."""
    name = workload.name
    of_call = [each for each in found.found if each.call == name]
    if any(each.cause == NONFINITE_INPUT for each in of_call):  # no kernel can be right then
        named = f"mend the model: its values are {found.first_nonfinite}"
        if not found.first_nonfinite:
            named = "record a run of the whole model to see where values stop being finite"
    else:
        wrong = {each.kernel for each in of_call}
        anywhere = {each.kernel for each in found.found}
        right = [
            each for each in found.right.get(name, []) if each not in (CAPTURED.name, *anywhere)
        ]
        if not right:
            right = [examiner.healthy([each for each in HEALTHY if each not in wrong], workload)]
        named = f"{right[0]}, which is right on this call" if right[0] else ""
    for at, each in enumerate(found.found):
        if each.call == name and each.is_wrong:
            ways = "; or ".join(filter(None, (named, REMEDIES[each.cause])))
            found.found[at] = replace(each, instead=ways)


class _Answer(NamedTuple):
    """Result of one kernel on one call."""

    diagnosis: Diagnosis | None = None
    refused: str = ""
    unreadable: str = ""
    untried: str = ""
    died: bool = False


class Examiner:
    """Examines kernels in this process, or in child processes.

    Each kernel has a child process, and a new one after each crash. A kernel that is wrong after
    other calls is examined again on that call alone, in a new process. The kernel has no state from
    earlier calls there, so an error must have another cause. Calls that fail alike are examined in
    a new process only once.

    Args:
        timeout: seconds without a message after which a child is killed; None to use this process.
        inside: modes for kernels that are right in eager mode.
    """

    def __init__(
        self, settings: Settings, timeout: float | None, inside: Sequence[Mode] = ()
    ) -> None:
        self._settings = settings
        self._inside = inside
        self._processes: list[Process] = []
        if timeout is None:
            with torch.no_grad():
                self._process_state = ProcessState()
        else:
            self._processes = [
                Process(sys.executable, timeout, "replay.diagnosis.server") for _ in range(2)
            ]
        self._calls = 0  # number of calls examined by the current process
        self._is_own: dict[tuple[str, str, str], bool] = {}
        """True for ways to fail that a new process repeats, False for ways that it does not."""

    def examine(self, kernel: Kernel, workload: Workload, found: Diagnoses) -> None:
        """Examine a kernel on a call in each mode, and add the results to `found`.

        A kernel that is wrong in eager mode is not examined in other modes.
        """
        tried: tuple[Mode, ...] = ()
        for mode in ("eager", *self._inside):
            calls = self._calls
            answer = self._answer(kernel, workload, mode)
            self._calls = 0 if answer.died else calls + 1
            if answer.unreadable:
                found.unreadable[workload.name] = answer.unreadable
                return
            if answer.untried:
                found.untried.setdefault((kernel.name, mode), answer.untried)
                continue
            tried, diagnosis = (*tried, mode), answer.diagnosis
            if diagnosis is not None:
                is_fixed = diagnosis.cause == NONFINITE_INPUT or diagnosis.evidence.get("flickers")
                if self._processes and not is_fixed:
                    diagnosis = self._without_state(kernel, workload, diagnosis, calls, mode)
                diagnosis = replace(diagnosis, tried=tried)
            found.add(workload.name, kernel.name, diagnosis, answer.refused)
            if mode == "eager" and (diagnosis is not None or answer.refused):
                return
            if mode == "graph" and diagnosis is not None:
                self._processes[0].close()  # PyTorch cannot be used after a failed capture
                self._calls = 0

    def _without_state(
        self, kernel: Kernel, workload: Workload, diagnosis: Diagnosis, calls: int, mode: Mode
    ) -> Diagnosis:
        """Return the diagnosis of a new process, or that of state kept from earlier calls."""
        way = way_to_fail(diagnosis)
        if not calls:
            self._is_own[way] = True
        elif way not in self._is_own:
            again = self._alone(kernel, workload, mode)
            if again is not None and way_to_fail(again) != way:
                return again
            self._is_own[way] = again is not None
        if self._is_own[way]:
            return diagnosis
        # Experiments that named another cause also called the kernel, and so changed what it keeps.
        sentence = diagnosis.sentence if diagnosis.cause == "unknown" else ""
        evidence = kept_from_earlier_calls(calls, sentence)
        return replace(
            diagnosis,
            cause=evidence.cause,
            sentence=evidence.sentence,
            evidence=evidence.numbers,
            instead=REMEDIES[evidence.cause],
        )

    def _alone(self, kernel: Kernel, workload: Workload, mode: Mode) -> Diagnosis | None:
        """Examine a kernel in a new process; None if it is right there in every repetition."""
        answers = (self._answer(kernel, workload, mode, is_alone=True) for _ in range(REPETITIONS))
        try:
            return next((each.diagnosis for each in answers if each.diagnosis is not None), None)
        finally:
            self._processes[1].close()

    def _answer(
        self, kernel: Kernel, workload: Workload, mode: Mode, *, is_alone: bool = False
    ) -> _Answer:
        origin, answer, about = Origin(), _Answer(), (workload.name, kernel.name)
        try:
            for message in self.ask("examine", [kernel], workload, mode, is_alone=is_alone):
                with self.reading(is_alone):
                    if "origin" in message:
                        origin = rebuilt(Origin, message["origin"])
                    elif "unreadable" in message:
                        answer = _Answer(unreadable=message["unreadable"])
                    elif "examined" in message:
                        given = message["examined"]
                        diagnosis = None if given is None else rebuilt(Diagnosis, given)
                        if diagnosis and (diagnosis.call, diagnosis.kernel) != about:
                            raise ValueError(f"a finding about {shown(diagnosis.kernel)}")
                        reasons = {name: message[name] for name in ("refused", "untried")}
                        answer = _Answer(diagnosis, **reasons)
        except Died as death:
            evidence = failure(death.status, str(death), WHERE[mode])
            return _Answer(diagnosed(workload.name, kernel.name, origin, evidence), died=True)
        return answer

    def healthy(self, names: Sequence[str], workload: Workload) -> str:
        """Return the name of the first kernel that is correct on a call; empty if none is."""
        left = list(names)
        while left:
            try:
                kernels = [find(name) for name in left]
                messages = list(self.ask("find healthy", kernels, workload))
                with self.reading():
                    named = [each["healthy"] for each in messages if "healthy" in each]
                    return left[left.index(named[0])] if named else ""
            except Died as death:
                left = left[left.index(death.kernel) + 1 :] if death.kernel in left else []
        return ""

    def ask(
        self,
        do: str,
        kernels: Sequence[Kernel],
        workload: Workload,
        mode: Mode = "eager",
        *,
        is_alone: bool = False,
        chunk: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """Yield the messages of `replay.diagnosis.server`.

        Raises:
            Died: the child crashed or hung.
        """
        if not self._processes:
            messages: list[dict[str, Any]] = []

            def say(**message: Any) -> None:
                messages.append(message)

            serve(do, kernels, workload, self._settings, self._process_state, say, mode, chunk)
            yield from messages
            return
        for message in self._processes[is_alone].ask(
            do=do,
            kernels=[kernel.name for kernel in kernels],
            workload=workload.source.to_json(),
            settings=self._settings.to_json(),
            mode=mode,
            chunk=chunk,
        ):
            if "failed" in message:
                raise DoctorError(message["failed"]) from RuntimeError(message["traceback"])
            yield message

    def reading(self, is_alone: bool = False) -> AbstractContextManager[None]:
        """End the child if this block finds that its message is invalid."""
        return reading(self._processes[is_alone]) if self._processes else nullcontext()

    def close(self) -> None:
        """End the child processes; the next kernel gets new ones."""
        for process in self._processes:
            process.close()
        self._calls = 0
