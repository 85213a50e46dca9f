"""The parent's access to the process that judges outputs, and its own observations of blocks."""

from __future__ import annotations

import contextlib
import math
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
from replay.isolation.judge import Judged
from replay.kernels.registry import KernelNameError, find
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import Row
from replay.rows.row_files import rebuilt
from replay.workers.process import Died, Process
from replay.workers.shared_memory import SharedFile
from replay.workloads.workload import Workload

QUESTIONS = ("open", "judge", "reserve block", "begin block", "end block")
"""Questions of workers, which may ask the judge nothing else."""


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


@dataclass
class CallEvidence:
    """Observations by this process of one worker's kernels on one call.

    Args:
        worker: the process that runs the kernels.
        null_s: receives the seconds of a block without a kernel, for a number of calls, and for
            sparse kernels or not.
        overheads_ms: receives the times by which known kernels take longer in a block.
    """

    judge: JudgeProcess
    workload: Workload
    settings: Settings
    worker: Process
    null_s: dict[tuple[int, bool], float]
    overheads_ms: list[float] = field(default_factory=list)
    _classes: dict[str, AccuracyClass] = field(default_factory=dict)
    _judged: dict[str, Judged] = field(default_factory=dict)
    """First judgement of each kernel, with its errors."""
    _verdicts: dict[str, list[bool]] = field(default_factory=dict)
    _blocks: dict[str, Blocks] = field(default_factory=dict)
    _least_calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Calls of each kernel's smallest block, and the bytes of an output."""
    _seed: int = 0
    _began: float = 0.0
    _used: tuple[float, float] = (0.0, 0.0)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a worker's question."""
        if question["do"] == "begin block":
            self._used = self._counters()
            self._seed, self._began = secrets.randbits(63), time.perf_counter()
            return {"seed": self._seed}
        kernel = question.get("kernel", "")
        if "accuracy_class" in question:
            if kernel not in self._classes:  # a search takes longer than a block
                self._classes[kernel] = _class_of(kernel, question["accuracy_class"])
            question["accuracy_class"] = self._classes[kernel]
        if question["do"] == "end block":
            return self._end_block(question)
        found = self._ask(question)
        if "judged" in found and not question["of_core"]:
            judged = rebuilt(Judged, found["judged"])
            self._judged.setdefault(kernel, judged)
            self._verdicts.setdefault(kernel, []).append(judged.finding.status == "ok")
        return found

    def _end_block(self, question: dict[str, Any]) -> dict[str, Any]:
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
        # Waits are not subtracted, because a kernel can make its own threads wait.
        is_interrupted = waited > INTERRUPTED * seconds
        if self.settings.device.type == "cpu":
            seconds = max(seconds, used / torch.get_num_threads())
        if "failed" in taken:
            return taken
        if not wrong:
            asked = {**question, "do": "judge block", "drawn": secrets.randbits(63)}
            found = self._ask({**asked, "seed": self._seed})
            if "failed" in found:
                return found
            wrong = found["wrong"]
        self._verdicts.setdefault(kernel, []).append(not wrong)
        null = calls, question["accuracy_class"] == "sparse"
        if null not in self.null_s:
            self.worker.stop()  # until the answer, so that a kernel cannot slow down this block
            self.null_s[null] = self._seconds_of_null(question)
        found_ms = call_ms(seconds, self.null_s[null], calls)
        seen = BlockVerdict(found_ms, is_interrupted, wrong)
        blocks.add(seen)
        smallest = calls, taken["output_bytes"]
        self._least_calls[kernel] = min(self._least_calls.get(kernel, smallest), smallest)
        return seen._asdict()

    def _seconds_of_null(self, question: dict[str, Any]) -> float:
        """Return the seconds of a block without a kernel, with the copy of its outputs."""
        block_s = typed(
            float, self._ask({**question, "do": "run null block"})["seconds"], "seconds"
        )
        copies_s = []
        for _ in range(NULL_BLOCKS):
            began = time.perf_counter()
            self._ask({**question, "do": "take block"})
            copies_s.append(time.perf_counter() - began)
        return block_s + min(copies_s)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if "handed" in question:
            question["handed"]["path"] = self.judge.shared_file
        return self.judge.answer(question, self.workload, self.settings)

    def _counters(self) -> tuple[float, float]:
        """Return seconds that the worker's threads waited for a processor, and that they ran."""
        if (pid := self.worker.pid) is None:
            return 0.0, 0.0
        return processes.waited_seconds(pid), processes.processor_seconds(pid)

    def confirmed(self, row: Row) -> Row:
        """Return a row with this process's times, or an error row where the two contradict."""
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
        verdicts = self._verdicts.get(row.kernel, [])
        if not verdicts or not all(verdicts):
            return "its row says that it is right, and the judge does not"
        judged_as = self._classes[row.kernel]
        if row.accuracy_class != judged_as:
            return f"its row says that it is {row.accuracy_class}, and it was judged as {judged_as}"
        if row.time_ms is not None and row.kernel not in self._least_calls:
            return "its row has a time that no block of calls has confirmed"
        if row.time_ms is not None:
            calls, output_bytes = self._least_calls[row.kernel]
            wanted = calls_of_block(max(row.time_ms.p50, row.host_ms or 0.0), output_bytes)
            # The worker's median may be of other rounds, so it may round to half as many calls.
            if calls < wanted // 2:
                return f"a block had {calls} calls, too few to confirm {row.time_ms.p50:.3g} ms"
        return ""
