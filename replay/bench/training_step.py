"""A kernel's backward pass on one call, alone or with its forward, as in a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import DIFFERENTIATED
from replay.isolation.inputs import aliases


class TrainingStep:
    """Backward of a kernel, from the call's inputs and its `grad_output`.

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
        output = self._forward() if output is None else output
        return torch.autograd.grad(output, self._leaves, self._grad_output, allow_unused=True)

    def _forward(self) -> Tensor:
        with torch.enable_grad():
            return self._attention(**self._arguments)
