"""How captions and noise levels reach the denoisers, as far as the two share it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

NOISIER = (4.0, 1.2)  # exponents at the start and at the end of the training; 1 is uniform


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


def draw_times(
    count: int, progress: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """(count,) times of the noise schedule, 0 data, 1 noise: most noise first, later all kinds.

    A thing that can be seen need not be read about, so captions are learned from those times alone
    that hide it; as a rare few among the others they teach nothing. Each batch has one time from
    each of ``count`` parts that are equally likely.
    """
    within = torch.rand(count, generator=generator, device=device)
    even = (torch.arange(count, device=device) + within) / count
    return 1 - even ** (NOISIER[0] + progress * (NOISIER[1] - NOISIER[0]))


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
