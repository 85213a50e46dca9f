"""Causes of exceptions: a kernel that raises on a call runs on calls that differ in one thing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.bench.settings import Settings
from replay.bench.stages import CheckedKernel
from replay.diagnosis.derived import HeadRows, can_be_gathered
from replay.diagnosis.experiments import Hypothesis, first_evidence
from replay.diagnosis.hypotheses.head_dims import padded_head_dim
from replay.diagnosis.hypotheses.lengths import odd_length
from replay.diagnosis.hypotheses.limits import smallest, too_large
from replay.diagnosis.hypotheses.memory import flickering
from replay.diagnosis.hypotheses.others import kv_heads
from replay.diagnosis.hypotheses.strides import strides
from replay.diagnosis.kernel_runner import runner
from replay.diagnosis.subject import MOST_ROWS, Evidence, Score, Subject
from replay.isolation.output_form import output_shape
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import without_numbers


def _too_large(subject: Subject) -> Evidence | None:
    """Search for a limit, unless the kernel raises on the smallest call too."""
    if can_be_gathered(subject.call):
        output = subject.run(smallest(subject.call))
        if output is not None and bool(output.isnan().all()):
            return None
    return too_large(subject)


AS_RECORDED: Sequence[Hypothesis] = (flickering, strides)
IN_DENSE_MEMORY: Sequence[Hypothesis] = (odd_length, kv_heads, padded_head_dim, _too_large)
"""Hypotheses that run the kernel on other calls; the other hypotheses explain an output."""


def cause_of_exception(
    checked: CheckedKernel, settings: Settings, process_state: ProcessState
) -> Evidence | None:
    """Find the property of a call that makes a kernel raise; None if no experiment shows it.

    The cause is confirmed as for wrong outputs: the kernel is right without the property, raises
    again with it, and is right again without it.

    Raises:
        ContextLost: the kernel made the GPU unusable.
    """
    kernel, call, reason = checked.kernel, checked.call, checked.finding.reason
    if kernel.chosen is not None:  # its choice belongs to an output
        return None
    run = _Runs(checked, settings, process_state)
    if run(call) is None:
        return None
    rows = torch.arange(min(call.shape.q_len, MOST_ROWS), device=call.device)
    place, own = HeadRows(0, 0, rows), Score(False, math.inf, math.inf)
    subject = Subject(call, _nothing(call), place, own, run, kernel.accuracy_class, fault="raises")
    evidence, _ = first_evidence(subject, None, AS_RECORDED, IN_DENSE_MEMORY)
    if evidence is None:
        return None
    sentence = f"{evidence.sentence}: {reason}"
    return replace(evidence, sentence=sentence, numbers={**evidence.numbers, "status": "error"})


class _Runs:
    """Runs of a kernel that raises, for experiments that compare outputs.

    A run that raises in the same way returns NaN. A run that raises in another way, or whose output
    is wrong, returns None, because it shows nothing about the exception.
    """

    def __init__(
        self, checked: CheckedKernel, settings: Settings, process_state: ProcessState
    ) -> None:
        self._checked = checked
        self._thresholds = settings.tolerances
        self._run = runner(checked.kernel, settings, process_state, self._raised)
        self._has_raised = False

    def __call__(self, call: AttentionCall, poison: float | None = None) -> Tensor | None:
        self._has_raised = False
        output = self._run(call.to(call.device), poison)
        if output is None or self._has_raised:
            return output
        accuracy_class = self._checked.kernel.accuracy_class
        verdict = judge(output, Expected.of(call), accuracy_class, self._thresholds)
        return output if verdict.passed else None

    def _raised(self, call: AttentionCall, reason: str) -> Tensor | None:
        self._has_raised = True
        is_same = without_numbers(reason) == without_numbers(self._checked.finding.reason)
        return _nothing(call) if is_same else None


def _nothing(call: AttentionCall) -> Tensor:
    """Return NaN in the place of an output that the kernel did not return."""
    return torch.full(output_shape(call), torch.nan, dtype=call.dtype, device=call.device)
