"""A call's inputs and the memory around them, kept safe from the kernels that run on them.

Nothing a kernel does is believed: output memory is poisoned before it runs, and inputs are compared
with a copy, and restored, after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded

POISON = float("nan")
POISONED_BLOCKS = 4
"""Pieces of memory filled with NaN before a kernel runs: one for its output and some for the
contiguous or quantised copies of inputs that it may take first."""


class Inputs:
    """The inputs of a call as they were before any kernel ran.

    Args:
        forms: of the call, whose tensors of one name are the same.
    """

    def __init__(self, *forms: AttentionCall) -> None:
        tensors = {name: each for call in forms for name, each in call.tensors().items()}
        self._pristine = {
            name: narrow_expanded(tensor).clone()
            for name, tensor in tensors.items()
            if name != "output"
        }
        shape = forms[0].shape
        self._output_shape = (shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim)

    def poison(self, call: AttentionCall, value: float = POISON) -> None:
        """Leave `value` in the memory an output will probably get, so that an unwritten one shows.

        Without it that memory may still hold another kernel's right answer.
        """
        blocks = [
            torch.full(self._output_shape, value, dtype=call.dtype, device=call.device)
            for _ in range(POISONED_BLOCKS)
        ]
        del blocks

    def restore(self, call: AttentionCall) -> tuple[str, ...]:
        """Undo what a kernel did to a form's inputs; the names of those that it changed."""
        changed, given = [], call.tensors()
        for name, before in self._pristine.items():
            if name not in given:
                continue
            now = narrow_expanded(given[name])
            if torch.equal(now, before):
                continue
            if not bool(((now == before) | ((now != now) & (before != before))).all()):
                changed.append(name)
                now.copy_(before)
        return tuple(changed)


def drop_in(attention: Callable[..., Tensor], call: AttentionCall) -> Callable[[], Tensor]:
    """What a model would execute in place of this call, and nothing besides."""
    arguments = aliases(call)
    return lambda: attention(**arguments)


def aliases(call: AttentionCall) -> dict[str, Any]:
    """The arguments; what a kernel resizes or transposes in place stays so for itself only."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in call.arguments().items()
    }
