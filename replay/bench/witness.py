"""Sees every timed call: gives it inputs it has not seen, and keeps rows of what it returned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from capture.call import AttentionCall
from replay.bench.guard import Guard
from replay.bench.inputs import Inputs
from replay.bench.malformed import malformed
from replay.bench.referee import Sample
from replay.bench.stages import Checked
from replay.bench.variation import Flip, Variation

JUDGED_SAMPLES = 4
"""Of each kernel, drawn after all of them were taken."""
COMPARED = 8
"""One sample in so many has its inputs compared in full afterwards. Changes that PyTorch makes show
in the version of a tensor each time; those of other libraries do not."""


class Part(NamedTuple):
    """A kernel as a model calls it, or its core alone."""

    kernel: str
    is_core: bool = False


class Witness:
    """Looks after the inputs of kernels that are timed together.

    A core is given nothing new: what it works on was prepared once, before.
    """

    def __init__(self, checked: Sequence[Checked], inputs: Inputs, guard: Guard, seed: int) -> None:
        self._checked = {each.kernel.name: each for each in checked}
        self._inputs = inputs
        self._guard = guard
        self._draw = random.Random(seed)
        self._variations: dict[int, Variation] = {}
        for each in checked:
            self._variations.setdefault(id(each.call), Variation(each.call, seed))
        self._number = 0
        self._flip: Flip | None = None
        self._versions: list[int] = []
        self._samples: dict[str, list[Sample]] = {}
        self.faults: dict[str, str] = {}
        """What a timed call returned that is no output at all, by kernel."""
        self.changed: dict[str, set[str]] = {}
        """Inputs that changed while a kernel was timed, by kernel."""

    def before(self, part: Part) -> None:
        checked = self._checked[part.kernel]
        variation = self._variations[id(checked.call)]
        if checked.changed_inputs:
            self._inputs.restore(checked.call)
            variation.forget()
        if part.is_core:
            variation.undo()
        else:
            values_only = checked.kernel.chosen is not None
            self._number, self._flip = variation.next(values_only=values_only)
        self._versions = _versions(checked.call)

    def after(self, part: Part, result: object) -> None:
        checked, name = self._checked[part.kernel], part.kernel
        look_closer = self._draw.randrange(COMPARED) == 0
        self._guard.settle(name, thoroughly=look_closer)
        if not part.is_core and name not in self.faults:
            self._keep(checked, result)
        if checked.changed_inputs:
            return
        suspicious = _versions(checked.call) != self._versions
        if suspicious or look_closer:
            variation = self._variations[id(checked.call)]
            variation.undo()
            if changed := self._inputs.restore(checked.call):
                self.changed.setdefault(name, set()).update(changed)

    def close(self) -> None:
        """Make the inputs what they were before any kernel was timed."""
        for variation in self._variations.values():
            variation.undo()

    def drawn_samples(self, kernel: str) -> list[Sample]:
        """Some of a kernel's timed samples."""
        samples = self._samples.get(kernel, [])
        return self._draw.sample(samples, min(JUDGED_SAMPLES, len(samples)))

    def _keep(self, checked: Checked, result: object) -> None:
        call = checked.call
        if wrong := malformed(result, call):
            self.faults[checked.kernel.name] = f"{wrong} when it was timed"
            return
        assert isinstance(result, Tensor)
        flip = self._flip
        assert flip is not None
        sample = Sample(self._number, flip.changed.of(result), flip.others.of(result))
        self._samples.setdefault(checked.kernel.name, []).append(sample)


def _versions(call: AttentionCall) -> list[int]:
    return [tensor._version for tensor in call.tensors().values()]
