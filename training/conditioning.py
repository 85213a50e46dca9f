"""How captions and noise levels reach the denoisers, as far as the two share it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase


def token_ids(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], length: int) -> Tensor:
    """(B, length), padded as the pipelines pad."""
    ids: Tensor = tokenizer(
        list(captions),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


def evenly(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(count,), one number in each of as many equal parts of 0…1: every batch sees every noise."""
    within = torch.rand(count, generator=generator, device=device)
    return (torch.arange(count, device=device) + within) / count


@torch.no_grad()
def start_as_identity(transformer: nn.Module) -> None:
    """Let every block add nothing and the output be zero at first, which trains faster.

    Peebles and Xie, Scalable Diffusion Models with Transformers, 2022 (adaLN-Zero).
    """
    for name, module in transformer.named_modules():
        modulates = name.endswith(".linear") and "norm" in name
        if isinstance(module, nn.Linear) and (modulates or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
