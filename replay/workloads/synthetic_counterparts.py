"""Synthetic counterparts of recorded calls, which have random values but are otherwise equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import copy_with_strides, narrow_expanded

RANDOM = "none: random values, standard normal"
MATCHED = "none: random values, moments of the recorded ones"
"""The `weights` entry in rows of a counterpart of kind `matched`."""


def _as_drawn(drawn: Tensor, recorded: Tensor) -> Tensor:
    return drawn


def _matched(drawn: Tensor, recorded: Tensor) -> Tensor:
    """Give drawn values the recorded mean and standard deviation of each channel of each head."""
    if not recorded.numel():  # PyTorch warns about the moments of an empty tensor
        return drawn
    deviation, mean = torch.std_mean(recorded.float(), dim=(0, 2), correction=0, keepdim=True)
    return drawn * deviation.nan_to_num(1.0) + mean.nan_to_num(0.0)


KINDS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "random": (RANDOM, _as_drawn),
    "matched": (MATCHED, _matched),
}
"""Kinds of counterparts, by the ending of their names. Each has a `weights` entry for rows, and a
function that makes the counterpart's values from standard normal and recorded values."""


def counterpart(call: AttentionCall, kind: str, seed: int) -> AttentionCall:
    """Replace a call's query, key and value with random values of one of `KINDS`."""
    weights, shaped = KINDS[kind]
    device = call.query.device
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    shares = call.value_is_in_key
    for name in ("query", "key") if shares else ("query", "key", "value"):
        tensors[name] = copy_with_strides(getattr(call, name), device)
        stored = narrow_expanded(tensors[name])
        drawn = torch.randn(stored.shape, generator=generator, device=device)
        stored.copy_(shaped(drawn, stored))
    if shares:
        tensors["value"] = tensors["key"][..., : call.value.shape[-1]]
    origin = replace(call.origin, weights=weights)
    return replace(call.with_tensors(tensors), output=None, origin=origin)
