"""The inputs and the process that kernels share, kept as they were while the kernels are timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from capture.call.attention_call import AttentionCall
from replay.bench.stages import CheckedKernel
from replay.isolation.inputs import Inputs
from replay.isolation.process_state import ProcessState

COMPARED = 8
"""Inputs are compared in full after one sample in this many, and after each warm-up. Changes by
PyTorch are always seen in a tensor's version."""


class TimedPart(NamedTuple):
    """Timed function of a kernel.

    The drop-in is the whole kernel as a model calls it for inference. `both` is its forward and
    backward in a training step.
    """

    kernel: str
    part: Literal["drop-in", "core", "backward", "both"] = "drop-in"


class SharedInputs:
    """Observer of samples that undoes what a kernel does to the inputs and to the process."""

    def __init__(
        self, checked: Sequence[CheckedKernel], inputs: Inputs, process_state: ProcessState
    ) -> None:
        self._checked = {member.kernel.name: member for member in checked}
        self._inputs = inputs
        self._process_state = process_state
        self._draw = random.Random(0)
        self._versions: dict[int, int] = {}
        """Version number of each input when it was last compared, keyed by the tensor's id."""
        for member in checked:
            self._versions.update(_versions(member.call))
        self.prepare: dict[TimedPart, Callable[[], None]] = {}
        """Work before each sample of a part, such as the forward pass before a backward pass."""
        self._warm: set[TimedPart] = set()
        self.changed: dict[str, set[str]] = {}
        """Names of inputs that changed during the timing of a kernel, keyed by kernel."""

    def restore(self, kernel: str) -> None:
        """Restore the state of the process after an untimed run of a kernel."""
        self._process_state.restore(kernel)

    def before(self, part: TimedPart) -> None:
        checked = self._checked[part.kernel]
        if checked.changed_inputs:
            self._inputs.restore(checked.call)
        else:
            self._compare(checked, in_full=False)
        if part in self.prepare:
            self.prepare[part]()

    def after(self, part: TimedPart) -> None:
        self._process_state.restore(part.kernel)
        in_full = part not in self._warm or self._draw.randrange(COMPARED) == 0
        self._warm.add(part)
        self._compare(self._checked[part.kernel], in_full=in_full)

    def _compare(self, checked: CheckedKernel, *, in_full: bool) -> None:
        """Restore the shared inputs if a kernel seems to have changed them."""
        is_known = _versions(checked.call).items() <= self._versions.items()
        if checked.changed_inputs or (is_known and not in_full):
            return
        if changed := self._inputs.restore(checked.call):
            self.changed.setdefault(checked.kernel.name, set()).update(changed)
        self._versions.update(_versions(checked.call))


def _versions(call: AttentionCall) -> dict[int, int]:
    return {id(tensor): tensor._version for tensor in call.tensors().values()}
