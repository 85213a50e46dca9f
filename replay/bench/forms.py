"""The forms of a call: as it was recorded, and without its mask where options say the same.

A kernel that takes the mask gets the mask, since that is what it would get in the model. One that
refuses it gets the options, which is what its users would write, and so does one that says it
prefers them. What comes back is judged by the recorded call in either case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from capture.call.attention_call import AttentionCall
from capture.call.mask_structure import MaskStructure, structure_of
from replay.kernels.failures import Finding, classify
from replay.kernels.registry import Kernel


class Form(NamedTuple):
    """What a kernel runs."""

    call: AttentionCall
    restated_as: str = ""
    """Its mask in words, if the call is without it."""
    refused: Finding | None = None
    """Why it runs nothing."""


class Forms(NamedTuple):
    """A recorded call, and what its mask amounts to."""

    call: AttentionCall
    structure: MaskStructure | None = None
    rewritten: AttentionCall | None = None
    """The call without its mask; None without one, and where options cannot say the same."""

    @classmethod
    def of(cls, call: AttentionCall) -> Forms:
        structure = structure_of(call)
        return cls(call, structure, None if structure is None else structure.restated(call))

    @property
    def all(self) -> list[AttentionCall]:
        return [self.call] if self.rewritten is None else [self.call, self.rewritten]

    def form(self, kernel: Kernel, device: torch.device, *, for_model: bool = False) -> Form:
        """The form that a kernel runs on a device.

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
    """Why a kernel cannot run a call here, if it cannot."""
    try:
        kernel = kernel.loaded()
        if reason := kernel.unavailable(device):
            return Finding("unavailable", reason)
        if reason := kernel.refuses(call):
            return Finding("unsupported", reason)
    except BaseException as error:  # somebody's predicate is wrong, which costs its row only
        return classify(error)
    return None
