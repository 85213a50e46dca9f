"""Samples of timed outputs. Every timed call gets new inputs, and rows of some outputs are kept."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.stages import CheckedKernel
from replay.isolation.input_perturbation import InputPerturbation, PerturbationSequence
from replay.isolation.inputs import Inputs
from replay.isolation.judge import JUDGED_SAMPLES, Sample
from replay.isolation.output_form import malformed
from replay.isolation.process_state import ProcessState

COMPARED = 8
"""Inputs are compared in full in one sample in this many: after its first call and at its end. They
are also compared after each warm-up. Changes by PyTorch are always seen in a tensor's version."""

FINGERPRINT_ROWS = 4096
"""Number of rows of an output that a fingerprint reads, in about a microsecond on a GPU."""


class TimedPart(NamedTuple):
    """Timed function of a kernel: the whole kernel as a model calls it, or its core alone."""

    kernel: str
    is_core: bool = False


class OutputFingerprint:
    """One number from each of many rows of an output, spread evenly over its heads."""

    def __init__(self, output: Tensor, drawn: int) -> None:
        *heads, length, width = output.shape
        step = max(math.prod(heads) * length // FINGERPRINT_ROWS, 1)
        first, column = drawn % min(step, length), drawn // step % width
        self._places = ..., slice(first, None, step), column
        self._was = self._bytes(output)

    def differs_from(self, output: Tensor) -> Tensor:
        """Return a bool tensor on the device, without waiting: True if the output has changed."""
        return (self._was != self._bytes(output)).any()

    def _bytes(self, output: Tensor) -> Tensor:
        return output[self._places].clone(memory_format=torch.contiguous_format).view(torch.uint8)


class SampledOutputs:
    """Perturbed inputs and kept outputs of kernels that are timed together.

    Cores get no new inputs, because their operands are prepared before the timing.
    """

    def __init__(
        self,
        checked: Sequence[CheckedKernel],
        inputs: Inputs,
        process_state: ProcessState,
        seed: int,
    ) -> None:
        self._checked = {member.kernel.name: member for member in checked}
        self._inputs = inputs
        self._process_state = process_state
        self._draw = secrets.SystemRandom()
        self._sequences: dict[int, PerturbationSequence] = {}
        """Perturbations, keyed by the query tensor's id because forms of a call share tensors."""
        self._versions: dict[int, int] = {}
        """Version number of each input when it was last compared, keyed by the tensor's id."""
        for member in checked:
            self._sequences.setdefault(
                id(member.call.query), PerturbationSequence(member.call, seed)
            )
            self._versions.update(_versions(member.call))
        self._number = 0
        self._perturbation: InputPerturbation | None = None
        self._kept: Sample | None = None
        self._fingerprint: OutputFingerprint | None = None
        self._changed_after: dict[str, list[Tensor]] = {}
        """Bool tensors, keyed by kernel: True if a kept output changed after its call."""
        self._calls = 0
        self._look_closer = False
        self._warm: set[TimedPart] = set()
        self._samples: dict[str, list[Sample]] = {}
        self._faults: dict[str, str] = {}
        self.changed: dict[str, set[str]] = {}
        """Names of inputs that changed during the timing of a kernel, keyed by kernel."""

    def restore(self, kernel: str) -> None:
        """Restore the state of the process after an untimed run of a kernel."""
        self._process_state.restore(kernel)

    def before(self, part: TimedPart) -> None:
        checked = self._checked[part.kernel]
        sequence = self._sequences[id(checked.call.query)]
        if self._calls == 0:
            self._look_closer = self._draw.randrange(COMPARED) == 0
        self._compare_inputs(checked, in_full=self._look_closer and self._calls == 1)
        self._calls += 1
        if checked.changed_inputs:
            self._inputs.restore(checked.call)
            sequence.forget()
        if part.is_core:
            sequence.undo()
        else:
            values_only = checked.kernel.chosen is not None
            self._number, self._perturbation = sequence.next(values_only=values_only)
        self._versions.update(_versions(checked.call))

    def fingerprint(self, part: TimedPart, result: object) -> None:
        """Read some numbers of an output right after its call, on the call's own stream."""
        self._fingerprint = None
        if not (part.is_core or malformed(result, self._checked[part.kernel].call)):
            assert isinstance(result, Tensor)
            self._fingerprint = OutputFingerprint(result, self._draw.getrandbits(64))

    def keep(self, part: TimedPart, result: object) -> None:
        """Keep rows of an output, replacing those of an earlier output in the same sample."""
        call, name = self._checked[part.kernel].call, part.kernel
        if part.is_core or name in self._faults:
            return
        if wrong := malformed(result, call):
            self._faults[name] = f"{wrong} when it was timed"
            return
        assert isinstance(result, Tensor)
        assert self._perturbation is not None
        drawn = secrets.randbits(64)
        changed, others = (rows.of(result) for rows in self._perturbation.rows(drawn))
        self._kept = Sample(self._number, drawn, changed, others)
        if self._fingerprint is not None:
            self._changed_after.setdefault(name, []).append(self._fingerprint.differs_from(result))
            self._fingerprint = None

    def after(self, part: TimedPart) -> None:
        if self._kept is not None:
            self._samples.setdefault(part.kernel, []).append(self._kept)
            self._kept = None
        look_closer = self._look_closer or part not in self._warm
        checked = self._checked[part.kernel]
        self._process_state.restore(part.kernel)
        self._compare_inputs(checked, in_full=look_closer)
        self._warm.add(part)
        self._calls = 0
        sequence = self._sequences[id(checked.call.query)]
        sequence.get_ready(values_only=checked.kernel.chosen is not None)
        self._versions.update(_versions(checked.call))

    def close(self) -> None:
        """Restore the inputs as they were before any kernel was timed."""
        for sequence in self._sequences.values():
            sequence.undo()

    def fault(self, kernel: str) -> str:
        """Return a fault of timed outputs other than wrong values; empty if there is none."""
        if fault := self._faults.get(kernel):
            return fault
        changed = self._changed_after.get(kernel)
        if changed and torch.stack(changed).any():
            return "its output changes after the call, by work on a stream that is not waited for"
        return ""

    def drawn_samples(self, kernel: str) -> list[Sample]:
        """Draw some of a kernel's timed samples."""
        samples = self._samples.get(kernel, [])
        return self._draw.sample(samples, min(JUDGED_SAMPLES, len(samples)))

    def _compare_inputs(self, checked: CheckedKernel, *, in_full: bool) -> None:
        """Restore the shared inputs if a kernel seems to have changed them."""
        if checked.changed_inputs:
            return
        if in_full or not _versions(checked.call).items() <= self._versions.items():
            self._sequences[id(checked.call.query)].undo()
            if changed := self._inputs.restore(checked.call):
                self.changed.setdefault(checked.kernel.name, set()).update(changed)
            self._versions.update(_versions(checked.call))


def _versions(call: AttentionCall) -> dict[int, int]:
    return {id(tensor): tensor._version for tensor in call.tensors().values()}
