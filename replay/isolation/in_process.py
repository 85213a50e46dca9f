"""The judge of kernels that run in this process: it protects only against accidents."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import torch
from torch import Tensor

from replay.isolation import processes
from replay.isolation.block import INTERRUPTED, BlockVerdict, call_ms, null_seconds
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.isolation.output_form import output_shape
from replay.rows.errors_of_output import AccuracyClass


class InProcessJudge(LocalJudge):
    """Judge that also clocks blocks, with the clock of this process."""

    def begin_block(
        self, kernel: str, calls: int, chosen: Tensor | None
    ) -> tuple[int, list[Tensor]]:
        call, seed = self.call, secrets.randbits(63)
        shape = (calls, *output_shape(call))
        outputs = list(torch.zeros(shape, dtype=call.dtype, device=call.device))
        self._block = kernel, chosen, seed, outputs
        self._waited = processes.waited_seconds(os.getpid())
        self._began = time.perf_counter()
        return seed, outputs

    def end_block(
        self, accuracy_class: AccuracyClass, wrong: str, restore: Callable[[], None]
    ) -> BlockVerdict:
        seconds = time.perf_counter() - self._began
        restore()
        waited = processes.waited_seconds(os.getpid()) - self._waited
        is_interrupted = waited > INTERRUPTED * seconds
        kernel, chosen, seed, outputs = self._block
        if not wrong:
            drawn = secrets.randbits(63)
            wrong = self.judge_block(kernel, accuracy_class, seed, outputs, drawn, chosen)
        inputs = BlockInputs(self.call, values_only=chosen is not None)
        null_s = null_seconds(self.call, inputs, outputs)
        return BlockVerdict(call_ms(seconds, null_s, len(outputs)), is_interrupted, wrong)
