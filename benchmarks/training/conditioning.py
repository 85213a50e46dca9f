"""Captions and noise levels for both denoisers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

NOISIER = (4.0, 1.2)  # exponents at the start and the end of training; 1 is uniform


def token_ids(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], length: int) -> Tensor:
    """Tokenize captions to (B, length), padded as in the pipelines."""
    ids: Tensor = tokenizer(
        list(captions),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


def draw_times(
    count: int, progress: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Draw (count,) times from 0 (data) to 1 (noise): mostly noisy early in training, later
    uniform.

    A thing that is visible need not be read from the caption, so captions are learned only at times
    so noisy that the thing is not visible. If such times are rare, captions are not learned. Each
    batch has one time from each of ``count`` equally likely parts.
    """
    within = torch.rand(count, generator=generator, device=device)
    even = (torch.arange(count, device=device) + within) / count
    return 1 - even ** (NOISIER[0] + progress * (NOISIER[1] - NOISIER[0]))


@torch.no_grad()
def start_as_identity(transformer: nn.Module) -> None:
    """Initialise every block to add nothing and the output to zero, which trains faster.

    Peebles and Xie, Scalable Diffusion Models with Transformers, 2022 (adaLN-Zero).
    """
    for name, module in transformer.named_modules():
        modulates = name.endswith(".linear") and "norm" in name
        if isinstance(module, nn.Linear) and (modulates or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
