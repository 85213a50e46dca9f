"""The worker's access to the judge, which is in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.runner import JudgeFactory
from replay.bench.settings import Settings
from replay.isolation.block import BlockVerdict
from replay.isolation.judge import Choose, Judged, JudgedGradients
from replay.isolation.output_form import output_shape
from replay.kernels.failures import CannotJudge
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row_files import rebuilt
from replay.workers.shared_memory import Outbox, opened_on_gpu
from replay.workers.worker import Hear, Say


class RemoteJudge:
    """Judge reached through the parent process. Every method raises `CannotJudge` on failure.

    Args:
        outbox: memory for tensors, which the judge reads before it replies.
    """

    def __init__(self, say: Say, hear: Hear, outbox: Outbox, call: AttentionCall) -> None:
        self._say = say
        self._hear = hear
        self._outbox = outbox
        self._call = call
        self._block: dict[str, Any] = {}
        self._outputs: dict[str, tuple[torch.dtype, list[int]]] = {}
        """Dtype and shape of the block's outputs in the outbox; empty if they are on the GPU."""

    @classmethod
    def factory(cls, say: Say, hear: Hear, outbox: Outbox) -> JudgeFactory:
        """Return a function that makes the judge of a call and may raise `CannotJudge`."""

        def open_judge(
            call: AttentionCall, settings: Settings, compared: Tensor | None
        ) -> RemoteJudge:
            judge = cls(say, hear, outbox, call)
            judge._ask(do="open", handed=outbox.put(_optional("output", compared)))
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

    def judge_gradients(
        self, kernel: str, accuracy_class: AccuracyClass, gradients: dict[str, Tensor]
    ) -> JudgedGradients:
        answer = self._ask(
            do="judge gradients",
            kernel=kernel,
            accuracy_class=accuracy_class,
            handed=self._outbox.put(gradients),
        )
        return rebuilt(JudgedGradients, answer["judged"])

    def begin_block(self, kernel: str, calls: int) -> tuple[int, list[Tensor]]:
        dtype, shape = self._call.dtype, [calls, *output_shape(self._call)]
        outputs = self._on_gpu(dtype, shape)
        self._outputs = {} if outputs is not None else {"outputs": (dtype, shape)}
        handed, reserved = self._outbox.reserve(self._outputs, {})
        self._block = {"kernel": kernel, "calls": calls, "handed": handed}
        if outputs is None:
            outputs = reserved["outputs"]
        return self._ask(do="begin block")["seed"], list(outputs)

    def _on_gpu(self, dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        """Return the judge's memory for the outputs on a GPU; None if it cannot be shared."""
        if self._call.device.type != "cuda":
            return None
        answer = self._ask(do="reserve block", calls=shape[0])
        try:
            return opened_on_gpu(answer["memory"], dtype, shape)
        except RuntimeError:  # another version of PyTorch, or a system without shared GPU memory
            return None

    def end_block(
        self,
        accuracy_class: AccuracyClass,
        wrong: str,
        restore: Callable[[], None],
        choose: Choose | None,
    ) -> BlockVerdict:
        answer = self._ask(
            do="end block", accuracy_class=accuracy_class, wrong=wrong, **self._block
        )
        while choose is not None and "examined" in answer:
            keys = choose(answer["examined"])  # reads the output before, so `reserve` keeps it
            handed, _ = self._outbox.reserve(self._outputs, {"chosen": keys})
            answer = self._ask(do="choose", handed=handed)
        restore()
        return BlockVerdict(**answer)

    def _ask(self, **question: Any) -> dict[str, Any]:
        """Ask the parent, which passes questions on to the judge, and return the answer.

        Raises:
            CannotJudge: the judge failed.
        """
        self._say(judge=question)
        answer = self._hear()
        if "failed" in answer:
            raise CannotJudge(f"cannot be judged: {answer['failed']}")
        return answer


def _optional(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    return {} if tensor is None else {name: tensor}
