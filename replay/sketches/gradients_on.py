"""Lets gradients flow through a model's run, although the run turns them off.

Pipelines of diffusers and `generate` of transformers run under `torch.no_grad()`. The weights need
no gradients here, so the graph begins at the first attention call and holds nothing before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from attention_replay.errors import Error


class GradientError(Error):
    """Reason why a model's run has no gradients; the message gives the remedy."""


@contextlib.contextmanager
def gradients_on(roots: Mapping[str, nn.Module]) -> Iterator[None]:
    """Keep gradients enabled in all `torch.no_grad()` blocks, in every thread of this process.

    Weights need no gradients inside the block. Everything is restored on exit.
    """
    enter = torch.no_grad.__enter__
    weights = [each for root in roots.values() for each in root.parameters() if each.requires_grad]

    def stays_enabled(block: Any) -> None:
        block.prev = torch.is_grad_enabled()

    for each in weights:
        each.requires_grad_(False)
    torch.no_grad.__enter__ = stays_enabled  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.no_grad.__enter__ = enter  # type: ignore[method-assign]
        for each in weights:
            each.requires_grad_(True)


def check_gradients() -> None:
    """Raise GradientError inside a run that uses inference mode."""
    if torch.is_inference_mode_enabled():
        raise GradientError(
            "the run uses torch.inference_mode(), in which no gradients exist: run the model under "
            "torch.no_grad() instead"
        )
