"""The first training step with a kernel, beside that with the model's own attention.

Weights and data are equal in the first step, so the loss and all gradients differ by rounding only.
Later steps magnify that rounding, so their differences prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from capture.text.counted import counted
from replay.end_to_end.drift import FIRST_GRADIENT, Outputs
from replay.rows.row import Row

MOST_UNLIKE = 0.5
"""Largest distance of a right gradient from the baseline's, as a share of its norm. Rounding to 16
bits causes up to a few percent in the gradients of deep models."""
TF32 = 2**-10
"""Machine epsilon of products in 32 bits on a GPU."""
MOST_LOSS = 0.05
"""Largest relative difference of a right loss, which kernels in 8 bits reach."""


def wrong_first_step(own: Outputs, found: Outputs, rows: Sequence[Row]) -> str:
    """Return a sentence about a first step that rounding does not explain; empty if it does.

    Gradients below half the machine epsilon of all gradients together are noise, such as those of a
    bias of keys, which cancels in the softmax.

    Args:
        own: outputs of the run with the model's own attention.
        found: outputs of the run with the kernel.
        rows: rows of the kernel, whose calls have the dtype of attention.
    """
    before, after = (float(each["loss"][0]) for each in (own, found))
    if not abs(after - before) <= MOST_LOSS * abs(before):
        return f"the loss of the first step is {after:.6g}, {before:.6g} with its own attention"
    samples = {name: each for name, each in own.items() if name.startswith(FIRST_GRADIENT)}
    epsilon = max([TF32, *(torch.finfo(getattr(torch, row.call.dtype)).eps for row in rows)])
    noise = epsilon / 2 * math.hypot(*(float(each.norm()) for each in samples.values()))
    unlike = {}
    for name, right in samples.items():
        size, distance = float(right.norm()), float((found.get(name, math.inf) - right).norm())
        if not distance <= MOST_UNLIKE * size + noise:
            unlike[name] = distance / max(size, noise)
    if not unlike:
        return ""
    worst = max(unlike, key=lambda name: math.inf if math.isnan(unlike[name]) else unlike[name])
    others = f"; so do {counted(len(unlike) - 1, 'other gradient')}" if len(unlike) > 1 else ""
    return (
        f"in the first step, the gradient of {worst.removeprefix(FIRST_GRADIENT)} differs from "
        f"that with the model's own attention by {100 * unlike[worst]:.3g} %{others}"
    )
