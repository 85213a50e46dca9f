"""The optimisers: Muon for the matrices inside a transformer, AdamW for other parameters.

Muon moves a matrix equally far in all directions, including those whose gradient is faint at first,
as when a word of the caption only matters together with a place in the picture. Our video model
learned directions of motion with Muon, but not with AdamW in the same training time.

Source: Jordan, Muon: An optimizer for hidden layers in neural networks, 2024.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_BLOCK = re.compile(r"(^|\.)(\w*blocks?|layers)\.\d+\.")
_NOT_HIDDEN = re.compile(r"norm|bias|embed")


def hidden_matrices(*transformers: nn.Module) -> list[Tensor]:
    """Return the matrices of attention and feed-forward layers, not of embeddings or modulation."""
    return [
        parameter
        for transformer in transformers
        for name, parameter in transformer.named_parameters()
        if parameter.ndim == 2 and _BLOCK.search(name) and not _NOT_HIDDEN.search(name)
    ]


def adamw(
    parameters: Sequence[Tensor], *, learning_rate: float, weight_decay: float, fused: bool
) -> torch.optim.Optimizer:
    """Build AdamW without weight decay on biases and scales."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=fused,
    )


def muon(
    matrices: Sequence[Tensor], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build PyTorch's Muon with the settings that trained the weights of this package.

    Our own implementation trained those weights, with the same arithmetic in float32; PyTorch's
    Newton–Schulz iteration is in bfloat16.
    """
    return torch.optim.Muon(
        matrices,
        lr=learning_rate,
        weight_decay=weight_decay,
        momentum=0.95,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn="original",  # scales updates by max(1, √(out / in))
    )


def require_muon() -> None:
    """Fail early if this PyTorch is too old.

    Raises:
        RuntimeError: with the required version and the installed one.
    """
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(
            f"torch {torch.__version__} has no Muon, which trains this model: install torch 2.9 or "
            "newer (pip install 'torch>=2.9')"
        )
