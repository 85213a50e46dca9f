"""Texts as a language model reads them: encoded, scored, decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .errors import ModelError

SCORED_TOKENS = 4096
"""Tokens of a text that are scored at most: their logits over 128k words take 1 GiB in bfloat16."""


@dataclass(frozen=True)
class Language:
    """What a language model does with a text, beside continuing it.

    Attributes:
        score: Logits (T, V) on the CPU, row t those of the token after t, for token ids (1, T) read
            in one forward, as a prefill is. None for an encoder-decoder, which reads no text alone.
        tokenizer: None where there is none, as with random weights of full size.
        positions: How many tokens the model can read.
    """

    score: Callable[[torch.Tensor], torch.Tensor] | None
    tokenizer: PreTrainedTokenizerBase | None
    positions: int

    def encode(self, text: str) -> torch.Tensor:
        """Token ids (1, T) of the text's beginning, on the CPU: at most `SCORED_TOKENS`.

        Raises:
            ModelError: There is no tokenizer, or the text has fewer than two tokens.
        """
        if self.tokenizer is None:
            raise ModelError("these weights come without a tokenizer to read a text with")
        most = min(self.positions, SCORED_TOKENS)
        ids = self.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        if len(ids) < 2:
            raise ModelError("the text has fewer than two tokens: none follows another")
        return torch.tensor([ids])

    def decode(self, ids: torch.Tensor) -> str:
        """Text of token ids (1, T); without a tokenizer, the ids themselves."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids[0].tolist())
        return str(self.tokenizer.decode(ids[0]))
