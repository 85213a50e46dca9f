"""A kernel's forward and backward on one call, as in a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import DIFFERENTIATED
from replay.isolation.inputs import aliases

NO_BACKWARD = "has no backward"
"""Reason why a kernel is not differentiated."""


class NoBackward(Exception):
    """Raised if PyTorch cannot differentiate the output of a kernel; the message is a reason."""


class Differentiated(NamedTuple):
    """Result of a training step."""

    output: Tensor
    """(B, Hq, Sq, Dv)."""
    gradients: dict[str, Tensor]
    """Copies of the gradients, by name of the input; inputs without an effect are left out."""


class TrainingStep:
    """Forward and backward of a kernel, from the call's inputs and its `grad_output`.

    The gradients are returned and not accumulated, as the query, key and value of a model come from
    other operations. Each backward pass belongs to a forward pass of its own: a graph that is kept
    for another backward pass uses more memory, and compiled kernels refuse to keep one.
    """

    def __init__(self, attention: Callable[..., Tensor], call: AttentionCall) -> None:
        assert call.grad_output is not None
        self._attention = attention
        self._arguments = aliases(call)
        self._leaves = [self._arguments[name].requires_grad_() for name in DIFFERENTIATED]
        self._grad_output = call.grad_output
        self._output: Tensor | None = None

    def prepare(self) -> None:
        """Run the forward pass of the next `backward`."""
        self._output = self._forward()

    def backward(self) -> tuple[Tensor | None, ...]:
        """Run the backward pass after a forward pass that `prepare` ran, or else runs here.

        Returns:
            The gradients of query, key and value; None for an input that has no effect.
        """
        output, self._output = self._output, None
        if output is None:
            output = self._forward()
        return torch.autograd.grad(output, self._leaves, self._grad_output, allow_unused=True)

    def both(self) -> tuple[Tensor | None, ...]:
        """Run forward and backward; return the gradients of query, key and value."""
        return torch.autograd.grad(
            self._forward(), self._leaves, self._grad_output, allow_unused=True
        )

    def differentiated(self) -> Differentiated:
        """Run forward and backward, and return the output too.

        Raises:
            NoBackward: PyTorch cannot differentiate the output, or the kernel refuses to.
        """
        try:
            output = self._forward()
            if not output.requires_grad:
                raise NoBackward(NO_BACKWARD)
            found = torch.autograd.grad(output, self._leaves, self._grad_output, allow_unused=True)
        except NotImplementedError as error:
            line = str(error).partition("\n")[0]
            raise NoBackward(f"{NO_BACKWARD}: {line}" if line else NO_BACKWARD) from error
        named = zip(DIFFERENTIATED, found, strict=True)
        copies = {name: gradient.clone() for name, gradient in named if gradient is not None}
        return Differentiated(output.detach(), copies)

    def _forward(self) -> Tensor:
        with torch.enable_grad():
            return self._attention(**self._arguments)
