"""A call's inputs and the memory of its output, protected from kernels.

Output memory is poisoned before a kernel runs. Afterwards the inputs are compared with a copy and
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded

POISON = float("nan")
POISONED_BLOCKS = 4
"""Number of memory blocks to fill with NaN before a kernel runs: one for its output, and others for
contiguous or quantised copies of inputs, which the kernel may allocate first."""


class Inputs:
    """Inputs of a call as they were before any kernel ran.

    Args:
        forms: equal forms of the call, which share tensors of the same name.
    """

    def __init__(self, *forms: AttentionCall) -> None:
        tensors = {name: tensor for call in forms for name, tensor in call.tensors().items()}
        self._pristine = {
            name: narrow_expanded(tensor).clone()
            for name, tensor in tensors.items()
            if name != "output"
        }
        shape = forms[0].shape
        self._output_shape = (shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim)

    def poison(self, call: AttentionCall, value: float = POISON) -> None:
        """Fill the memory that an output will probably get, to reveal unwritten elements.

        Otherwise that memory could still hold the right output of another kernel.
        """
        blocks = [
            torch.full(self._output_shape, value, dtype=call.dtype, device=call.device)
            for _ in range(POISONED_BLOCKS)
        ]
        del blocks

    def rewrite(self, call: AttentionCall, names: Collection[str]) -> None:
        """Restore the named inputs, without looking for changes."""
        tensors = call.tensors()
        for name in names:
            narrow_expanded(tensors[name]).copy_(self._pristine[name])

    def restore(self, call: AttentionCall) -> tuple[str, ...]:
        """Undo a kernel's changes to a form's inputs; return the names of the changed inputs."""
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
    """Return a function that runs the kernel on this call as a model would."""
    arguments = aliases(call)
    return lambda: attention(**arguments)


def aliases(call: AttentionCall) -> dict[str, Any]:
    """Return the call's arguments as new views, so that a resize affects no other kernel."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in call.arguments().items()
    }
