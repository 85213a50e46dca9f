"""The forms of a call: as recorded, and with equivalent options in place of its mask.

A kernel that refuses the mask, or prefers options, gets the options. In either case, its output is
judged against the reference for the recorded call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from capture.call.attention_call import AttentionCall
from capture.call.mask_structure import MaskStructure, structure_of
from replay.accuracy.gradient_verdict import why_not_judged
from replay.accuracy.kernel_gradients import NO_BACKWARD
from replay.kernels.failures import Finding, classify
from replay.kernels.registry import Kernel


class Form(NamedTuple):
    """Form of a call that a kernel runs."""

    call: AttentionCall
    restated_as: str = ""
    """Description of the mask that options replace; empty if the call runs as recorded."""
    refused: Finding | None = None
    """Reason why the kernel cannot run the call; None if it can."""


class Forms(NamedTuple):
    """A recorded call, the structure of its mask, and its form with options."""

    call: AttentionCall
    structure: MaskStructure | None = None
    rewritten: AttentionCall | None = None
    """The call with its mask replaced by equivalent options; None if no options are equivalent."""

    @classmethod
    def of(cls, call: AttentionCall) -> Forms:
        structure = structure_of(call)
        return cls(call, structure, None if structure is None else structure.restated(call))

    @property
    def all(self) -> list[AttentionCall]:
        return [self.call] if self.rewritten is None else [self.call, self.rewritten]

    def form(self, kernel: Kernel, device: torch.device, *, for_model: bool = False) -> Form:
        """Return the form that a kernel runs on a device.

        Args:
            for_model: see `replay.bench.settings.Settings`.
        """
        refused = refusal(kernel, self.call, device)
        if self.rewritten is None or (refused is not None and refused.status != "unsupported"):
            return Form(self.call, refused=refused)
        if refused is None and (
            for_model or not kernel.loaded().prefers_rewritten_mask(self.rewritten)
        ):
            return Form(self.call)
        if refusal(kernel, self.rewritten, device) is not None:
            return Form(self.call, refused=refused)
        return Form(self.rewritten, str(self.structure))


def refusal(kernel: Kernel, call: AttentionCall, device: torch.device) -> Finding | None:
    """Return the reason why a kernel cannot run a call on a device; None if it can.

    A call with a `grad_output` needs a backward pass too.
    """
    try:
        kernel = kernel.loaded()
        if reason := kernel.unavailable(device):
            return Finding("unavailable", reason)
        if call.grad_output is not None and (reason := _not_differentiated(kernel, call)):
            return Finding("unsupported", reason)
        if reason := kernel.refuses(call):
            return Finding("unsupported", reason)
    except BaseException as error:  # a faulty predicate costs only the row of its kernel
        return classify(error)
    return None


def _not_differentiated(kernel: Kernel, call: AttentionCall) -> str:
    if kernel.differentiable is False:
        return NO_BACKWARD
    if kernel.accuracy_class == "sparse":
        return "gradients of sparse kernels cannot be judged"
    return why_not_judged(call)
