"""Difficulty of a call for a quantised kernel: the error of INT8 attention on a sample of tokens.

The error reflects everything that makes a call hard (outlier channels of K, blocks whose peak is
far above their root mean square, the range of V, close scores) or easy (weights on one key, a mean
that all values share). A few queries attend to a thousand keys twice: with the model's values, and
with values rounded to INT8. The difficulty is the relative L1 distance of the two outputs. Query
and key are rounded as in SageAttention (Zhang et al. 2024), with a scale per 64 tokens and after
subtracting K's mean. The value is rounded with a scale per channel.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall

QUERIES, KEYS, BATCH = 32, 1024, 4
"""Maximum numbers of queries, keys and batch elements in the sample, which are evenly spaced."""
BLOCK = 64
"""Number of tokens that share a scale."""
LARGEST = 127.0


def with_difficulty(call: AttentionCall) -> AttentionCall:
    """Return a call with its difficulty in its origin; waits for the call's device."""
    found = difficulty(call).item()
    known = found if math.isfinite(found) else None
    return replace(call, origin=replace(call.origin, difficulty=known))


@torch.no_grad()
def difficulty(call: AttentionCall) -> Tensor:
    """Return the difficulty, a float32 scalar on the call's device.

    The difficulty is NaN for a call without tokens, or with NaN or infinite values. This function
    uses no random numbers and not SDPA, and waits for the device only for pages.
    """
    with torch.autocast(call.device.type, enabled=False):
        call = call.without_pages().without_scales()
        batch = _evenly(call.query.shape[0], BATCH, call.device)
        rows = _evenly(call.query.shape[2], QUERIES, call.device)
        columns = _evenly(call.key.shape[2], KEYS, call.device)
        if not (len(rows) and len(columns)):
            return torch.tensor(math.nan, device=call.device)
        query = call.query[batch][:, :, rows].float()
        key, value = (kv[batch][:, :, columns].float() for kv in (call.key, call.value))
        exact = _attention(call, query, key, value, (batch, rows, columns))
        mean = key.mean(2, keepdim=True)
        query, key = _rounded_by_block(query), _rounded_by_block(key - mean) + mean
        value = _rounded(value, value.abs().amax(2, keepdim=True))
        rounded = _attention(call, query, key, value, (batch, rows, columns))
        return (rounded - exact).abs().sum() / exact.abs().sum()


Indices = tuple[Tensor, Tensor, Tensor]
"""Chosen batch elements, queries and keys."""


def _evenly(length: int, most: int, device: torch.device) -> Tensor:
    """Return at most `most` evenly spaced indices: any number up to `BLOCK`, or a multiple of
    it."""
    count = min(length, most)
    count -= count % BLOCK if count > BLOCK else 0
    return torch.linspace(0, length - 1, count, device=device, dtype=torch.float64).round().long()


def _attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, chosen: Indices
) -> Tensor:
    """Compute attention of the chosen tokens with the call's options.

    The output is zero for a query that sees none of the chosen keys.
    """
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    scores = query.unflatten(1, (heads, groups)) @ key.unsqueeze(2).mT * call.softmax_scale
    scores = scores.flatten(1, 2)
    if (cap := call.variant.softcap) is not None:
        scores = cap * (scores / cap).tanh()
    batch, rows, columns = chosen
    if (mask := call.attn_mask) is not None:
        mask = mask[(None,) * (4 - mask.ndim)].expand(*call.query.shape[:3], call.key.shape[2])
        mask = mask[batch][:, :, rows][..., columns]
        hidden = ~mask if mask.dtype == torch.bool else None
        scores = scores + mask.float() if hidden is None else scores.masked_fill(hidden, -math.inf)
    if call.is_causal or call.features:
        first, end = (
            each.expand(call.query.shape[0], -1)[batch][:, None, rows, None]
            for each in call.key_ranges
        )
        scores = scores.masked_fill((columns < first) | (columns >= end), -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None, None].expand(len(batch), -1, len(rows), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    return weights.unflatten(1, (heads, groups)) @ value.unsqueeze(2)


def _rounded_by_block(tensor: Tensor) -> Tensor:
    """Round a tensor (B, H, S, D) with a scale per `BLOCK` tokens."""
    blocks = tensor.unflatten(2, (-1, min(tensor.shape[2], BLOCK)))
    return _rounded(blocks, blocks.abs().amax((3, 4), keepdim=True)).flatten(2, 3)


def _rounded(tensor: Tensor, peak: Tensor) -> Tensor:
    scale = peak.clamp_min(torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (tensor / scale).round_().mul_(scale)
