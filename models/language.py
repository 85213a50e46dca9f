"""Encode, score and decode texts with a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .errors import ModelError
from .inference import quiet

SCORED_TOKENS = 4096
"""Maximum number of scored tokens, whose logits (128k each) take 1 GiB in bfloat16."""

MOST_WINDOWS = 4
"""Maximum number of windows of a text, whose logits are all in memory."""


@dataclass(frozen=True)
class Language:
    """Model and tokenizer that score, encode and decode texts.

    Attributes:
        score: Function that computes logits (T, V) on the CPU for token ids (1, T) in one forward
            pass, as in prefill; row t predicts token t + 1. None for an encoder-decoder model,
            which cannot score a single text.
        tokenizer: Tokenizer of the model; None for random weights of full size, which have none.
        positions: Maximum number of tokens that the model can read.
    """

    score: Callable[[torch.Tensor], torch.Tensor] | None
    tokenizer: PreTrainedTokenizerBase | None
    positions: int

    def encode(self, text: str) -> torch.Tensor:
        """Return the token ids (1, T) of at most the first `SCORED_TOKENS` tokens, on the CPU."""
        if self.tokenizer is None:
            raise ModelError("these weights have no tokenizer to read a text: leave out the text")
        most = min(self.positions, SCORED_TOKENS)
        ids = self.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        if len(ids) < 2:
            raise ModelError("the text has fewer than two tokens: give a longer one")
        return torch.tensor([ids])

    def windows(self, text: str) -> list[torch.Tensor]:
        """Return the token ids (1, T) of up to `MOST_WINDOWS` windows of a text, on the CPU.

        A window has as many tokens as `encode` returns at most, and begins like the whole text with
        the token of a beginning, if there is one. A text that is shorter than two windows has one.
        """
        most = min(self.positions, SCORED_TOKENS)
        first = self.encode(text)
        with quiet():  # a text longer than the model's positions is reported
            ids = self.tokenizer(text)["input_ids"]  # type: ignore[misc]
        start = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []  # type: ignore[union-attr]
        step = most - len(start)
        rest = ids[most:]
        more = [rest[at : at + step] for at in range(0, len(rest), step)][: MOST_WINDOWS - 1]
        return [first, *(torch.tensor([start + w]) for w in more if len(w) == step)]

    def decode(self, ids: torch.Tensor) -> str:
        """Convert token ids (1, T) to text; without a tokenizer, return the ids as text."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids[0].tolist())
        return str(self.tokenizer.decode(ids[0]))
