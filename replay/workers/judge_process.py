"""The parent's access to the judge's process, and the parent's own observations of blocks."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from capture.storage.json_data import typed
from replay.bench.confirmation import MOST_BLOCKS, Blocks, overhead_ms, rejected, with_blocks
from replay.bench.settings import Settings
from replay.isolation import processes
from replay.isolation.block import (
    INTERRUPTED,
    LEAST_CALLS,
    MOST_CALLS,
    NULL_BLOCKS,
    BlockVerdict,
    call_ms,
    calls_of_block,
)
from replay.isolation.block_inputs import draw_calls
from replay.isolation.judge import Judged, JudgedGradients
from replay.kernels.registry import KernelNameError, find
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import Row
from replay.rows.row_files import rebuilt
from replay.workers.process import Died, Process
from replay.workloads.workload import Workload

QUESTIONS = (
    "open",
    "judge",
    "judge gradients",
    "reserve block",
    "begin block",
    "end block",
    "choose",
)
"""The only questions that workers may ask the judge."""


class JudgeProcess:
    """Process that judges outputs and runs no kernel, started at the first request.

    Args:
        process: the result of `replay.workers.process.judge_process`.
    """

    def __init__(self, process: Process) -> None:
        self.shared_file = process.place.shared.descriptor
        """Descriptor of the file through which workers pass outputs to the judge."""
        self._process = process
        self._expecting: Iterator[dict[str, Any]] = iter(())
        """Replies to `expect` that have not been read yet."""

    def expect(self, workload: Workload, settings: Settings) -> None:
        """Request that the judge load a call while a worker loads it too; do not wait."""
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
        known = {"settings": settings.to_json(), "file": self.shared_file}
        return self._process.answer(**{**question, **known})

    def _finish_expecting(self) -> None:
        for _ in self._expecting:
            pass

    def probe_ms(self, settings: Settings) -> float:
        """Return the milliseconds of a probe of the GPU; infinity if it fails."""
        self._finish_expecting()
        with contextlib.suppress(Died):
            answer = self._process.answer(do="probe", settings=settings.to_json())
            return float(answer.get("ms", math.inf))
        return math.inf

    def end(self) -> None:
        """Request the end of the process; `close` waits for the end."""
        self._process.end()

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _class_of(kernel: str, declared: AccuracyClass) -> AccuracyClass:
    """Return the accuracy class of a kernel, from this process's registry.

    This process does not import a user's code, so a user's kernel keeps its first declared class.
    """
    try:
        found = find(kernel)
    except KernelNameError:  # a kernel from another environment
        return declared
    return declared if found.load is not None else found.accuracy_class


@dataclass
class CallEvidence:
    """Observations of this process about one worker's kernels on one call.

    Args:
        worker: the process that runs the kernels.
        null_s: receives the seconds of a block without a kernel, and of the copy of its outputs, by
            number of calls.
        overheads_ms: receives the times by which known kernels take longer in blocks.
    """

    judge: JudgeProcess
    workload: Workload
    settings: Settings
    worker: Process
    null_s: dict[int, tuple[float, float]]
    overheads_ms: list[float] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    """Kernels with a wrong output. They stay wrong when their worker is started again."""
    _classes: dict[str, AccuracyClass] = field(default_factory=dict)
    _judged: dict[str, Judged] = field(default_factory=dict)
    """First judgement of each kernel, with the errors of its output."""
    _gradients: dict[str, JudgedGradients] = field(default_factory=dict)
    """Judgement of each kernel's gradients."""
    _unfinished: list[str] = field(default_factory=list)
    """Kernels whose last block has no verdict yet, because the worker must still send keys."""
    _blocks: dict[str, Blocks] = field(default_factory=dict)
    _least_calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number of calls in each kernel's smallest block, and bytes of an output."""
    _seed: int = 0
    _began: float = 0.0
    _used: tuple[float, float] = (0.0, 0.0)
    _ending: Iterator[dict[str, Any]] = field(default_factory=lambda: iter(()))
    """Answers at the end of a block that the worker has not received yet."""
    _choice: dict[str, Any] = field(default_factory=dict)
    """Message about the keys that a sparse kernel chose in an examined call."""

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a worker's question."""
        if question["do"] == "begin block":
            self._used = self._counters()
            self._seed, self._began = secrets.randbits(63), time.perf_counter()
            return {"seed": self._seed}
        kernel = question.get("kernel", "")
        if "accuracy_class" in question:
            if kernel not in self._classes:  # the registry is too slow to search in a block
                self._classes[kernel] = _class_of(kernel, question["accuracy_class"])
            question["accuracy_class"] = self._classes[kernel]
        if question["do"] == "end block":
            self._ending = self._end_block(question)
            return next(self._ending)
        if question["do"] == "choose":
            self._choice = question["handed"]
            if (answer := next(self._ending, None)) is None:
                raise ValueError("chosen keys outside the end of a block")
            return answer
        found = self._ask(question)
        if "judged" in found and question["do"] == "judge gradients":
            of_gradients = rebuilt(JudgedGradients, found["judged"])
            self._gradients.setdefault(kernel, of_gradients)
            if of_gradients.finding.status != "ok":
                self.wrong.add(kernel)
        elif "judged" in found and not question["of_core"]:
            judged = rebuilt(Judged, found["judged"])
            self._judged.setdefault(kernel, judged)
            if judged.finding.status != "ok":
                self.wrong.add(kernel)
        return found

    def _end_block(self, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Stop the clock, have outputs judged, and yield the verdict.

        If the kernel is sparse, first yield the number of each examined call. The worker answers
        with the keys that the kernel chose in that call (`_choice`).
        """
        kernel, calls = question["kernel"], typed(int, question["calls"], "calls")
        wrong = typed(str, question.pop("wrong"), "wrong")
        blocks = self._blocks.setdefault(kernel, Blocks())
        if not self._began or not LEAST_CALLS <= calls <= MOST_CALLS:
            raise ValueError(f"a block of {calls} calls")
        if len(blocks.ms) == MOST_BLOCKS:
            raise ValueError(f"more than {MOST_BLOCKS} blocks")
        taken = self._ask({**question, "do": "take block"})
        seconds, self._began = time.perf_counter() - self._began, 0.0
        waited, used = (
            now - before for now, before in zip(self._counters(), self._used, strict=True)
        )
        # The time of waits counts, because a kernel can make its own threads wait.
        is_interrupted = waited > INTERRUPTED * seconds
        if self.settings.device.type == "cpu":
            seconds = max(seconds, used / torch.get_num_threads())
        if "failed" in taken:
            yield taken
            return
        is_sparse, drawn = question["accuracy_class"] == "sparse", secrets.randbits(63)
        asked = {**question, "do": "judge block", "drawn": drawn, "seed": self._seed}
        self._unfinished.append(kernel)
        for number in draw_calls(calls, random.Random(drawn)) if is_sparse else (calls - 1,):
            if wrong:
                break
            if is_sparse:
                yield {"examined": number}
                asked = {**asked, "number": number, "handed": self._choice}
            found = self._ask(asked)
            if "failed" in found:
                yield found
                return
            wrong, blocks.other_share = found["wrong"], found["other_share"]
        self._unfinished.remove(kernel)
        if wrong:
            self.wrong.add(kernel)
        if calls not in self.null_s:
            self.worker.stop()  # until the answer, so that the kernel cannot slow down this block
            measured = self._seconds_of_null(question)
            if self.worker.ran_while_stopped():
                raise ValueError("work after a block, while it was stopped")
            self.null_s[calls] = measured
        null_s, copy_s = self.null_s[calls]
        found_ms = call_ms(seconds, null_s + copy_s, calls)
        seen = BlockVerdict(found_ms, is_interrupted, wrong, null_s * 1000 / calls)
        blocks.add(seen)
        smallest = calls, taken["output_bytes"]
        self._least_calls[kernel] = min(self._least_calls.get(kernel, smallest), smallest)
        yield seen._asdict()

    def _seconds_of_null(self, question: dict[str, Any]) -> tuple[float, float]:
        """Return the seconds of a block without a kernel, and of the copy of its outputs.

        A block counts no longer than a larger one, and a call no longer than in a smaller block.
        Otherwise a kernel's work that continues on the GPU could make the result too long.
        """
        found = self._ask({**question, "do": "run null block"})["seconds"]
        calls, block_s = question["calls"], typed(float, found, "seconds")
        others = [each[0] * max(calls / size, 1.0) for size, each in self.null_s.items()]
        block_s = min([block_s, *others])
        copies_s = []
        for _ in range(NULL_BLOCKS):
            began = time.perf_counter()
            self._ask({**question, "do": "take block"})
            copies_s.append(time.perf_counter() - began)
        return block_s, min(copies_s)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return self.judge.answer(question, self.workload, self.settings)

    def _counters(self) -> tuple[float, float]:
        """Return the seconds that the worker's threads waited for a processor, and ran."""
        if (pid := self.worker.pid) is None:
            return 0.0, 0.0
        return processes.waited_seconds(pid), processes.processor_seconds(pid, with_ended=True)

    def confirmed(self, row: Row) -> Row:
        """Return the row with this process's observations, or an error if it contradicts them."""
        why = self._why_rejected(row)
        if self.settings.device.type == "cpu":
            row = replace(row, host_ms=None, layer_host_ms=None)  # there are no launches
        if row.is_correct and not why:
            judged = self._judged[row.kernel]
            row = replace(
                row,
                accuracy=judged.accuracy,
                kept=judged.kept,
                output_summary=judged.output_summary,
                reference_summary=judged.reference_summary,
                gradients=self._gradients[row.kernel].errors if self.settings.backward else None,
            )
        if not why:
            overhead = max(self.overheads_ms, default=0.0)
            row = with_blocks(row, self._blocks.get(row.kernel, Blocks()), overhead)
            if not row.process:
                self.overheads_ms.append(overhead_ms(row))
            why = row.reason if row.status == "error" and row.time_ms is not None else ""
        return rejected(row, why) if why else row

    def _why_rejected(self, row: Row) -> str:
        if not row.is_correct:
            return ""
        if row.kernel not in self._judged or row.kernel in (*self.wrong, *self._unfinished):
            return "its row says that its output is right, but the judge does not"
        if self.settings.backward and row.kernel not in self._gradients:
            return "its row says that its gradients are right, but none were judged"
        judged_as = self._classes[row.kernel]
        if row.accuracy_class != judged_as:
            return f"its row says {row.accuracy_class}, but its output was judged as {judged_as}"
        if row.time_ms is not None and row.kernel not in self._least_calls:
            return "its row has a time, but no block of calls confirmed it"
        if row.time_ms is not None:
            calls, output_bytes = self._least_calls[row.kernel]
            wanted = calls_of_block(max(row.time_ms.p50, row.host_ms or 0.0), output_bytes)
            # The worker may have used the median of other rounds, and so half as many calls.
            if calls < wanted // 2:
                return f"a block had {calls} calls, too few to confirm {row.time_ms.p50:.3g} ms"
        return ""
