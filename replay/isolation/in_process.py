"""The judge of kernels that run in the same process, which protects only from accidents."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable

import torch
from torch import Tensor

from replay.isolation import processes
from replay.isolation.block import INTERRUPTED, BlockVerdict, call_ms, null_seconds
from replay.isolation.block_inputs import BlockInputs, draw_calls
from replay.isolation.judge import Choose, LocalJudge
from replay.isolation.output_form import output_shape
from replay.rows.errors_of_output import AccuracyClass


class InProcessJudge(LocalJudge):
    """Judge that also clocks blocks, with this process's clock."""

    def begin_block(self, kernel: str, calls: int) -> tuple[int, list[Tensor]]:
        call, seed = self.call, secrets.randbits(63)
        shape = (calls, *output_shape(call))
        outputs = list(torch.zeros(shape, dtype=call.dtype, device=call.device))
        self._block = kernel, seed, outputs
        self._waited = processes.waited_seconds(os.getpid())
        self._began = time.perf_counter()
        return seed, outputs

    def end_block(
        self,
        accuracy_class: AccuracyClass,
        wrong: str,
        restore: Callable[[], None],
        choose: Choose | None,
    ) -> BlockVerdict:
        seconds = time.perf_counter() - self._began
        restore()
        waited = processes.waited_seconds(os.getpid()) - self._waited
        is_interrupted = waited > INTERRUPTED * seconds
        kernel, seed, outputs = self._block
        if not wrong:
            drawn = secrets.randbits(63)
            numbers = draw_calls(len(outputs), random.Random(drawn))
            chosen = ((number, choose(number)) for number in numbers) if choose else None
            wrong = self.judge_block(kernel, accuracy_class, seed, outputs, drawn, chosen)
        null_s = null_seconds(self.call, BlockInputs(self.call), outputs)
        calls = len(outputs)
        found_ms, null_ms = call_ms(seconds, null_s, calls), null_s * 1000 / calls
        return BlockVerdict(found_ms, is_interrupted, wrong, null_ms)
