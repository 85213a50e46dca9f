"""Batch invariance of kernels on recorded calls, each kernel in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import get_args

from capture.call.attention_call import Origin
from capture.text.counted import counted
from capture.text.printable import printable
from replay.bench.settings import Settings
from replay.diagnosis.diagnosis import place_of
from replay.diagnosis.examinations import Examiner, Progress
from replay.diagnosis.invariance import Case, Verdict
from replay.kernels.registry import Kernel
from replay.rows.row_files import rebuilt
from replay.workers.process import Died
from replay.workloads.workload import Workload

CASES: tuple[Case, ...] = get_args(Case)
WIDTH = 80
"""Width of the printed sentences, in characters."""


@dataclass(frozen=True)
class Agreement:
    """Verdicts on a kernel on one call."""

    call: str
    kernel: str
    layer: str
    """Dotted path of the module that made the call."""
    step: int
    verdicts: dict[Case, Verdict]
    """Verdicts of the cases that apply to the call."""


@dataclass
class Agreements:
    """Verdicts of one run of `replay agree`; print them for a table."""

    found: list[Agreement] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why a call could not be read, by call."""
    note: str = ""
    """Warning about how the recording was read; usually empty."""

    @property
    def differ(self) -> list[Agreement]:
        """Agreements with a difference between two outputs, or a kernel that failed."""
        wrong = ("differs", "failed")
        return [
            each for each in self.found if any(v.outcome in wrong for v in each.verdicts.values())
        ]

    @property
    def is_decided(self) -> bool:
        """True if bits differ, or were equal in another case than `repeated`."""
        verdicts = (pair for each in self.found for pair in each.verdicts.items())
        return bool(self.differ) or any(
            case != "repeated" and verdict.outcome == "equal" for case, verdict in verdicts
        )

    def __str__(self) -> str:
        """Return the table that `replay agree` prints, with the first difference in each case."""
        return "\n".join(_lines(self.found))


def agreements(
    workloads: Sequence[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    timeout: float | None,
    report: Progress,
    *,
    chunk: int,
) -> Agreements:
    """Return the verdicts of kernels on calls.

    Args:
        timeout: seconds without a message after which a kernel's process is killed; None to run
            the kernels in this process.
        chunk: number of queries in a chunk.
    """
    found, examiner = Agreements(), Examiner(settings, timeout)
    for kernel in kernels:
        try:
            for workload in workloads:
                if workload.name not in found.unreadable:
                    report(workload, kernel.name)
                    _examine(examiner, kernel, workload, chunk, found)
        finally:
            examiner.close()
    return found


def _examine(
    examiner: Examiner, kernel: Kernel, workload: Workload, chunk: int, found: Agreements
) -> None:
    origin, verdicts = Origin(), {}
    try:
        for message in examiner.ask("agree", [kernel], workload, chunk=chunk):
            with examiner.reading():
                if "origin" in message:
                    origin = rebuilt(Origin, message["origin"])
                elif "unreadable" in message:
                    found.unreadable[workload.name] = message["unreadable"]
                    return
                elif "agreed" in message:
                    given = message["agreed"]
                    verdicts = {
                        each: rebuilt(Verdict, given[each]) for each in CASES if each in given
                    }
    except Died as death:
        verdicts = {"repeated": Verdict("failed", f"{death.status}: {death}")}
    found.found.append(Agreement(workload.name, kernel.name, origin.module, origin.step, verdicts))


def _lines(found: Sequence[Agreement]) -> Iterator[str]:
    """Yield a row for each kernel, followed by its first difference or refusal in each case."""
    by_kernel: dict[str, list[Agreement]] = {}
    for each in found:
        by_kernel.setdefault(each.kernel, []).append(each)
    width = max((len(printable(name)) for name in by_kernel), default=0)
    yield "  ".join([" " * width, *(f"{case:10}" for case in CASES)]).rstrip()
    for kernel, members in by_kernel.items():
        cells = []
        sentences: list[str] = []
        for case in CASES:
            of_case = [each for each in members if case in each.verdicts]
            compared = [each for each in of_case if each.verdicts[case].outcome != "refused"]
            equal = sum(each.verdicts[case].outcome == "equal" for each in compared)
            count = f"{equal} of {len(compared)}" if compared else "refused" if of_case else "-"
            cells.append(f"{count:10}")
            sentences += _sentences(case, of_case)
        yield "  ".join([f"{printable(kernel):{width}}", *cells]).rstrip()
        for sentence in map(printable, sentences):
            yield from wrap(sentence, WIDTH, subsequent_indent="    ", break_long_words=False)
    if found:
        yield "calls with equal bits, of those compared; -: no call is divided in this way"


def _sentences(case: Case, members: Sequence[Agreement]) -> Iterator[str]:
    groups: dict[str, list[Agreement]] = {}
    for each in members:
        groups.setdefault(each.verdicts[case].outcome, []).append(each)
    groups.pop("equal", None)
    for outcome, group in groups.items():
        first = group[0]
        yield (
            f"  {case}: {outcome} on {counted(len(group), 'call')}: {first.call}, "
            f"{place_of(first.layer, first.step)}: {first.verdicts[case].sentence}"
        )
