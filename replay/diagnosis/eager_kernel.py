"""Kernel that is right in eager mode, for comparison with the same kernel in another mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.accuracy.thresholds import Thresholds
from replay.accuracy.verdict import Expected, judge
from replay.diagnosis.derived import can_be_gathered, changed, gathered
from replay.diagnosis.subject import Evidence
from replay.isolation.inputs import aliases
from replay.isolation.output_form import malformed
from replay.kernels.failures import classify
from replay.kernels.registry import Kernel


class CannotCompare(Exception):
    """Reason why a kernel's modes cannot be compared; the kernel may be right in each."""


@dataclass(frozen=True)
class EagerResult:
    """Right output of a kernel on a call in eager mode."""

    about: str
    """Description of the call's values."""
    call: AttentionCall
    output: Tensor = field(repr=False)
    kernel: Kernel = field(repr=False)
    thresholds: Thresholds = field(repr=False)

    @cached_property
    def _expected(self) -> Expected:
        chosen = None if self.kernel.chosen is None else self.kernel.chosen(self.call)
        return Expected.of(self.call, chosen)

    def error(self, output: Tensor) -> str:
        """Return a sentence about an output's error against the reference; empty if it is right."""
        accuracy_class = self.kernel.accuracy_class
        verdict = judge(output, self._expected, accuracy_class, self.thresholds)
        return "" if verdict.passed else verdict.sentence

    def difference(self, output: Tensor) -> str:
        """Return a sentence if an output has other bits than the eager one and is wrong.

        Other bits alone are allowed, because compiled code may round in another order.
        """
        if wrong := malformed(output, self.call):
            return wrong
        return "" if torch.equal(output, self.output) else self.error(output)


@dataclass(frozen=True)
class EagerKernel:
    """Kernel with the form of a call that it accepts."""

    kernel: Kernel
    call: AttentionCall
    thresholds: Thresholds

    def run(self, call: AttentionCall) -> Tensor:
        """Call the kernel as a model would, in the current mode."""
        return self.kernel.attention(**aliases(call))

    @cached_property
    def first(self) -> EagerResult:
        """Result for values half as large, so that a scale kept from them is too small later.

        Raises:
            CannotCompare: the kernel is wrong.
        """
        return self._result("the first values", _half_as_large(changed(self.call)))

    @cached_property
    def new(self) -> EagerResult:
        """Result for the recorded values.

        Raises:
            CannotCompare: the kernel is wrong.
        """
        return self._result("new values", self.call)

    @cached_property
    def shorter(self) -> EagerResult | None:
        """Result for three quarters of the queries and keys; None if the kernel has none."""
        shape, device = self.call.shape, self.call.device
        queries, keys = (-(-length * 3 // 4) for length in (shape.q_len, shape.kv_len))
        if keys == shape.kv_len or not can_be_gathered(self.call):
            return None
        rows, columns = (torch.arange(n, device=device) for n in (queries, keys))
        call = gathered(self.call, queries=rows, keys=columns)
        if self.kernel.refuses(call):
            return None
        try:
            return self._result(f"another length ({queries:,} queries, {keys:,} keys)", call)
        except CannotCompare:
            return None

    def _result(self, about: str, call: AttentionCall) -> EagerResult:
        call = call.to(call.device)
        try:
            output = self.run(call)
        except Exception as error:
            reason = classify(error).reason
            raise CannotCompare(f"in eager mode, {about}: {reason}") from error
        result = EagerResult(about, call, output.clone(), self.kernel, self.thresholds)
        if wrong := malformed(output, call) or result.error(output):
            raise CannotCompare(f"in eager mode, {about}: {wrong}")
        return result

    def verified(self, evidence: Evidence, is_wrong_again: bool) -> Evidence:
        """Return the evidence for a wrong output if its controls confirm it.

        Args:
            is_wrong_again: result of the same experiment, repeated. The eager results must also be
                right again.
        """
        then = "" if is_wrong_again else "right when repeated"
        for result in (self.first, self.new):
            if result.difference(self.run(result.call)):
                then = f"then wrong in eager mode too, with {result.about}"
        if not then:
            return evidence
        numbers = {**evidence.numbers, "flickers": True}
        return Evidence("unknown", f"{evidence.sentence}; it is {then}", numbers)


def _half_as_large(call: AttentionCall) -> AttentionCall:
    call = call.to(call.device)
    names = ("query", "key") if call.value_is_in_key else ("query", "key", "value")
    for name in names:
        narrow_expanded(getattr(call, name)).mul_(0.5)
    return call
