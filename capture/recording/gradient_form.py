"""Turns the gradients of a call into the tensors that its file stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import GRADIENTS
from capture.recording.heads import picked_gradient


@dataclass(frozen=True)
class GradientForm:
    """Shapes and dtypes of a call's tensors, which its gradients have too."""

    forms: dict[str, tuple[torch.Size, torch.dtype]]
    """Shape and dtype of each tensor with all its heads, by name."""
    heads: tuple[Sequence[int], Sequence[int]] | None = None
    """Query heads and key/value heads that are stored; None for all."""

    @classmethod
    def of(cls, call: AttentionCall, output: Tensor) -> GradientForm:
        """Return the form of a whole call with this output, which need not be stored."""
        forms = {name: (each.shape, each.dtype) for name, each in call.tensors().items()}
        size = torch.Size((*call.query.shape[:3], call.value.shape[3]))
        return cls({**forms, "output": (size, output.dtype)})

    def stored(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients by field, with four dimensions.

        Autocast casts tensors before the call, so their gradients are cast to the call's dtype,
        which is exact. The gradient of a tensor that was broadcast, or that serves other heads than
        the stored ones, is left out.
        """
        found = {}
        for name, gradient in gradients.items():
            size, dtype = self.forms.get(name, (None, None))
            if size is None or gradient.numel() != size.numel():
                continue
            whole = gradient.to(dtype)
            if whole.shape != size:  # SDPA's leading dimensions
                whole = whole.reshape(size)
            part: Tensor | None = whole
            if self.heads is not None:
                part = picked_gradient(name, whole, self.forms["query"][0][1], *self.heads)
            if part is not None:
                found[GRADIENTS[name]] = part[(None,) * (4 - part.ndim)]
        return found


def gradient_bytes(call: AttentionCall) -> int:
    """Return the bytes of the gradients of a call's query, key, value and output."""
    rows = call.query.numel() // max(1, call.shape.head_dim)
    elements = call.query.numel() + call.key.numel() + call.value.numel()
    return (elements + rows * call.shape.v_head_dim) * call.dtype.itemsize
