"""Muon: momentum, made orthogonal, for the weight matrices inside of a transformer.

All directions of a matrix move equally far, also those whose gradient is faint at first, as when
a word of the caption only matters together with a place in the picture. Our video model learned
directions with it and not, in the same time, with AdamW.

Source: Jordan, Muon: An optimizer for hidden layers in neural networks, 2024.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
_BLOCK = re.compile(r"(^|\.)(\w*blocks?|layers)\.\d+\.")
_NOT_HIDDEN = re.compile(r"norm|bias|embed")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the source's: quick rather than exact


class Muon:
    """Updates ``matrices`` (each (out, in)) from their gradients; those of one shape together."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float = 0.01) -> None:
        self.weight_decay = weight_decay
        shapes = dict.fromkeys(tuple(matrix.shape) for matrix in matrices)
        self.groups = [[m for m in matrices if tuple(m.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros_like(torch.stack(group)) for group in self.groups]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """``learning_rate`` is the spectral norm of an update, times √(out / in) where that is >1.

        Every matrix has a gradient.
        """
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM))  # Nesterov's
            size = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-learning_rate * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """U·Vᵀ, roughly, of matrices (N, out, in) = U·S·Vᵀ: singular values between 0.6 and 1.3."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, second, third = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = first * x + (second * square + third * square @ square) @ x
    return x.mT if tall else x


def hidden_matrices(*transformers: torch.nn.Module) -> list[Tensor]:
    """The matrices of attention and feed-forward layers: none that embeds or modulates."""
    return [
        parameter
        for transformer in transformers
        for name, parameter in transformer.named_parameters()
        if parameter.ndim == 2 and _BLOCK.search(name) and not _NOT_HIDDEN.search(name)
    ]
