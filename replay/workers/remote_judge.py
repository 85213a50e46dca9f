"""The worker's access to a judge in another process: it sends outputs and waits for verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.runner import JudgeFactory
from replay.bench.settings import Settings
from replay.isolation.judge import BLOCK_MS, MOST_CALLS, Judged, OutputJudge, Sample, block_of_calls
from replay.kernels.failures import CannotJudge
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row_files import rebuilt
from replay.workers.shared_memory import Outbox
from replay.workers.worker import Hear, Say

MOST_BLOCKS = 5
"""Maximum number of blocks until two clocks agree. Each block is twice as long as the one before,
because on a busy machine a message may take longer than a short block."""

SHORT_MS = 5.0
"""GPU calls of at least this time take as long in a block as in a sample. For shorter calls, a
block also measures launches."""


class RemoteJudge:
    """Judge reached through the parent process. Every method raises `CannotJudge` on failure.

    Args:
        outbox: memory where the judge finds tensors; the judge reads them before it replies.
    """

    def __init__(self, say: Say, hear: Hear, outbox: Outbox) -> None:
        self._say = say
        self._hear = hear
        self._outbox = outbox

    @classmethod
    def factory(cls, say: Say, hear: Hear, outbox: Outbox) -> JudgeFactory:
        """Return a function that makes the judge of a call and may raise `CannotJudge`."""

        def open_judge(
            call: AttentionCall, seed: int, settings: Settings, compared: Tensor | None
        ) -> OutputJudge:
            judge = cls(say, hear, outbox)
            handed = outbox.put(_optional("output", compared))
            judge._ask(do="open", seed=seed, handed=handed)
            return judge

        return open_judge

    def judge(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        output: Tensor,
        chosen: Tensor | None,
        *,
        of_core: bool = False,
        with_accuracy: bool = True,
    ) -> Judged:
        handed = self._outbox.put({"output": output} | _optional("chosen", chosen))
        answer = self._ask(
            do="judge",
            kernel=kernel,
            accuracy_class=accuracy_class,
            handed=handed,
            of_core=of_core,
            with_accuracy=with_accuracy,
        )
        return rebuilt(Judged, answer["judged"])

    def judge_samples(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        samples: list[Sample],
        chosen: Tensor | None,
    ) -> str:
        if not samples:
            return ""
        tensors = _optional("chosen", chosen)
        for place, sample in enumerate(samples):
            tensors[f"changed.{place}"] = sample.changed
            tensors[f"others.{place}"] = sample.others
        numbers = [(sample.number, sample.drawn, sample.is_stepped) for sample in samples]
        answer = self._ask(
            do="samples",
            kernel=kernel,
            accuracy_class=accuracy_class,
            handed=self._outbox.put(tensors),
            numbers=numbers,
        )
        wrong: str = answer["wrong"]
        return wrong

    def clock(
        self, kernel: str, run: Callable[[], Tensor], device: torch.device, call_ms: float
    ) -> Tensor | None:
        if is_short := device.type == "cuda" and call_ms < SHORT_MS:
            block_of_calls(run, device, 1)
            began = time.perf_counter()
            block_of_calls(run, device, 3)
            call_ms = (time.perf_counter() - began) * 1000 / 3
        calls = max(1, min(int(BLOCK_MS / max(call_ms, 1e-3)), MOST_CALLS))
        for _ in range(MOST_BLOCKS):
            self._ask(do="start clock", kernel=kernel)
            began = time.perf_counter()
            output = block_of_calls(run, device, calls)
            block_ms = (time.perf_counter() - began) * 1000
            answer = self._ask(do="stop clock", kernel=kernel, calls=calls, block_ms=block_ms)
            if answer["agree"]:
                return output if calls == 1 and not is_short else None
            calls *= 2
        return None

    def _ask(self, **question: Any) -> dict[str, Any]:
        self._say(judge=question)
        answer = self._hear()
        if "failed" in answer:
            raise CannotJudge(f"cannot be judged: {answer['failed']}")
        return answer


def _optional(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    return {} if tensor is None else {name: tensor}
