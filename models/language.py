"""Encode, score and decode texts with a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .errors import ModelError

SCORED_TOKENS = 4096
"""Most tokens of a text that are scored: their logits over 128k tokens take 1 GiB in bfloat16."""


@dataclass(frozen=True)
class Language:
    """Tokenizer and model that score, encode and decode a text.

    Attributes:
        score: Computes logits (T, V) on the CPU for token ids (1, T) read in one forward, as in
            prefill; row t predicts token t + 1. None for an encoder-decoder, which cannot read a
            text alone.
        tokenizer: None if there is none, as with random weights of full size.
        positions: How many tokens the model can read.
    """

    score: Callable[[torch.Tensor], torch.Tensor] | None
    tokenizer: PreTrainedTokenizerBase | None
    positions: int

    def encode(self, text: str) -> torch.Tensor:
        """Return token ids (1, T) of the start of the text, on the CPU: at most `SCORED_TOKENS`.

        Raises:
            ModelError: There is no tokenizer, or the text has fewer than two tokens.
        """
        if self.tokenizer is None:
            raise ModelError("these weights have no tokenizer to read a text: leave out the text")
        most = min(self.positions, SCORED_TOKENS)
        ids = self.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        if len(ids) < 2:
            raise ModelError("the text has fewer than two tokens: give a longer one")
        return torch.tensor([ids])

    def decode(self, ids: torch.Tensor) -> str:
        """Convert token ids (1, T) to text; without a tokenizer, return the ids themselves."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids[0].tolist())
        return str(self.tokenizer.decode(ids[0]))
