"""A worker that does not judge timed calls, for comparison (`benchmarks.defence_overhead`).

The worker replaces `replay.workers.kernel_server` in a separate process. It omits the defences
against cheating kernels: new inputs for every timed call, sampled rows of the outputs, checks of
settings and functions, and the block of calls timed by another clock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from replay.bench import runner
from replay.bench.output_check import Checker
from replay.bench.stages import CheckedKernel, TimedKernel
from replay.isolation.judge import Sample
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import Finding
from replay.timing.rounds import Samples
from replay.workers.kernel_server import handle
from replay.workers.remote_judge import RemoteJudge

__all__ = ["handle"]


class Blind:
    """Replacement for `replay.bench.sampled_outputs.SampledOutputs`."""

    def __init__(self, *_: object) -> None:
        self.changed: dict[str, set[str]] = {}

    def restore(self, kernel: str) -> None: ...

    def before(self, part: object) -> None: ...

    def fingerprint(self, part: object, result: object) -> None: ...

    def keep(self, part: object, result: object) -> None: ...

    def after(self, part: object) -> None: ...

    def close(self) -> None: ...

    def fault(self, kernel: str) -> str:
        return ""

    def drawn_samples(self, kernel: str) -> Sequence[Sample]:
        return ()


def _restore(process_state: ProcessState, kernel: str) -> None: ...


def _timed_finding(checker: Checker, timed: TimedKernel) -> Finding:
    return timed.checked.finding


def _in_a_row(
    checker: Checker, checked: CheckedKernel, samples: Samples, last: list[Any]
) -> Finding:
    return checked.finding


def _clock(
    judge: RemoteJudge,
    kernel: str,
    run: Callable[[], Tensor],
    device: torch.device,
    call_ms: float,
) -> None: ...


replaced: list[tuple[Any, str, Any]] = [
    (runner, "SampledOutputs", Blind),
    (ProcessState, "restore", _restore),
    (Checker, "_timed_finding", _timed_finding),
    (Checker, "_in_a_row", _in_a_row),
    (RemoteJudge, "clock", _clock),
]
for owner, name, stub in replaced:
    assert hasattr(owner, name), f"{name} has another name now"
    original = getattr(owner, name)
    if not isinstance(original, type):
        takes, took = (list(inspect.signature(each).parameters)[1:] for each in (stub, original))
        assert takes == took, f"{name} takes {took} now"
    setattr(owner, name, stub)
