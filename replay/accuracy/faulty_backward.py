"""The backward pass of a key head and its query heads, in float64, with one bug.

Bugs in P exist in two forms, because kernels compute P from the log-sum-exp and the output of the
right forward pass, while simple functions normalise it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.nonfinite import mask_block, visible_keys

TILES = (16, 32, 64, 128)
"""Numbers of keys that kernels load at once."""

INPUTS = ("query", "key", "value")

Gradients = Mapping[str, Tensor]
"""Gradients by the name of their tensor."""

Hypotheses = Iterator[tuple[str, Gradients]]
"""A sentence about each bug, and the gradients with that bug."""


class Place(NamedTuple):
    """A key head of a batch element, and the query heads that it serves."""

    batch: int
    head: int
    group: int

    @property
    def heads(self) -> slice:
        return slice(self.head * self.group, (self.head + 1) * self.group)

    def of(self, gradients: Gradients) -> dict[str, Tensor]:
        """Return the part of each input's gradient: (G, Sq, D) of the query, else (Sk, D)."""
        return {
            name: gradients[name][self.batch, self.heads if name == "query" else self.head].double()
            for name in INPUTS
            if name in gradients
        }


@dataclass(frozen=True)
class FaultyBackward:
    """The backward of a key head and the query heads that it serves, in float64."""

    query: Tensor
    """(G, Sq, D)"""
    key: Tensor
    """(Sk, D)"""
    value: Tensor
    """(Sk, Dv)"""
    upper: Tensor
    """(G, Sq, Dv): gradient of the output."""
    visible: Tensor
    """(1 or G, Sq, Sk) bool."""
    bias: Tensor | None
    sinks: Tensor | None
    """(G, 1, 1)"""
    scale: float
    softcap: float | None
    place: Place

    @classmethod
    def of(cls, call: AttentionCall, place: Place) -> FaultyBackward:
        assert call.grad_output is not None
        batch, heads, bias = place.batch, place.heads, None
        rows, keys = slice(0, call.shape.q_len), slice(0, call.shape.kv_len)
        visible = visible_keys(call, call.key_ranges, batch, heads, rows, keys)
        if call.attn_mask is not None and call.attn_mask.is_floating_point():
            bias = mask_block(call.attn_mask, batch, heads, rows, keys).double()
        return cls(
            call.query[batch, heads].double(),
            call.key[batch, place.head].double(),
            call.value[batch, place.head].double(),
            call.grad_output[batch, heads].double(),
            visible,
            bias,
            None if call.sinks is None else call.sinks[heads].double()[:, None, None],
            call.softmax_scale,
            call.variant.softcap,
            place,
        )

    def with_bugs(self, found: Gradients, right: Gradients) -> Hypotheses:
        """Yield the gradients with each bug."""
        if self.query.shape[1] == self.key.shape[0]:
            turned = self.summed(self.gradients(is_transposed=True))
            yield "the scores are transposed once too often", turned
        yield from self._with_other_masks()
        yield from self._with_stale_tiles(found, right)

    def with_keys_of(self, earlier: FaultyBackward) -> Hypotheses:
        """Yield the gradients with the keys of an earlier call."""
        text = "keys are stale: those of an earlier call are used"
        yield from self._in_both_forms(text, key=earlier.key)

    def _in_both_forms(
        self, text: str, *, key: Tensor | None = None, visible: Tensor | None = None
    ) -> Hypotheses:
        for is_normalised in (False, True):
            found = self.gradients(key=key, visible=visible, is_normalised=is_normalised)
            yield text, self.summed(found)

    def _with_other_masks(self) -> Hypotheses:
        visible = self.visible
        if bool(visible.all()):
            return
        more, fewer = visible.clone(), visible.clone()
        more[..., 1:] |= visible[..., :-1]
        fewer[..., :-1] &= visible[..., 1:]
        fewer[..., -1] = False
        wrong = "the diagonal is wrong: each query sees one key too"
        yield from self._in_both_forms(f"{wrong} many", visible=more)
        yield from self._in_both_forms(f"{wrong} few", visible=fewer)
        yield from self._in_both_forms("the mask is ignored", visible=torch.ones_like(visible))

    def _with_stale_tiles(self, found: Gradients, right: Gradients) -> Hypotheses:
        """Yield gradients with the tile of keys that deviates most replaced by its neighbour."""
        name = "key" if "key" in found else "value"
        if name not in found:
            return
        deviation = (found[name] - right[name]).square().sum(-1)
        for size in TILES:
            parts = deviation.split(size)
            worst = int(torch.stack([each.sum() for each in parts]).argmax())
            for other in (worst - 1, worst + 1):
                if not 0 <= other < len(parts):
                    continue
                count = min(len(parts[worst]), len(parts[other]))
                key = self.key.clone()
                key[worst * size :][:count] = self.key[other * size :][:count]
                last = worst * size + count - 1
                text = f"keys {worst * size} to {last} are stale: they are those {size} keys "
                text += "before" if other < worst else "after"
                yield from self._in_both_forms(text, key=key)

    def gradients(
        self,
        *,
        key: Tensor | None = None,
        visible: Tensor | None = None,
        is_normalised: bool = True,
        is_transposed: bool = False,
    ) -> dict[str, Tensor]:
        """Return the gradients of each query head: (G, Sq, D), (G, Sk, D) and (G, Sk, Dv).

        Args:
            key, visible: the wrong keys and mask that the backward reads.
            is_normalised: normalise P again, instead of using the right forward's log-sum-exp.
            is_transposed: use P and dS transposed.
        """
        read = self.key if key is None else key
        seen = self.visible if visible is None else visible
        scores, slope = self._scores(read, seen)
        right_scores = scores if is_normalised else self._scores(self.key, self.visible)[0]
        lse = right_scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        weights, of_weights = torch.exp(scores - lse), self.upper @ self.value.mT
        forward = weights if is_normalised else torch.exp(right_scores - lse)
        delta = (forward * of_weights).sum(-1, keepdim=True)
        of_scores = self.scale * weights * (of_weights - delta) * slope
        if is_transposed:
            weights, of_scores = weights.mT, of_scores.mT
        return {
            "query": of_scores @ read,
            "key": of_scores.mT @ self.query,
            "value": weights.mT @ self.upper,
        }

    def _scores(self, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the scores and the slopes of the soft cap."""
        scores: Tensor = self.scale * (self.query @ key.mT)
        slope: Tensor | float = 1.0
        if self.softcap:
            ratio = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * ratio, 1 - ratio.square()
        if self.bias is not None:
            scores = scores + self.bias
        return scores.masked_fill(~visible, -math.inf), slope

    @staticmethod
    def summed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up the gradients of key and value over the query heads."""
        return {name: each if name == "query" else each.sum(0) for name, each in gradients.items()}
