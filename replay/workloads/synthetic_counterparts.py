"""Recorded calls with other values, to see how far random inputs mislead.

Shapes, strides, dtype, mask and scale stay the same, so any difference in speed, power or error is
due to the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import copy_with_strides, narrow_expanded
from replay.workloads.recorded import Workload

RANDOM = "none: random values, standard normal"
MATCHED = "none: random values, moments of the recorded ones"
"""What rows say of the weights of a twin."""


def _as_drawn(drawn: Tensor, recorded: Tensor) -> Tensor:
    return drawn


def _matched(drawn: Tensor, recorded: Tensor) -> Tensor:
    """With the mean and the standard deviation of each channel of each head (B, H, S, D)."""
    if not recorded.numel():  # no keys, of whose moments PyTorch warns
        return drawn
    deviation, mean = torch.std_mean(recorded.float(), dim=(0, 2), correction=0, keepdim=True)
    return drawn * deviation.nan_to_num(1.0) + mean.nan_to_num(0.0)


KINDS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "random": (RANDOM, _as_drawn),
    "matched": (MATCHED, _matched),
}
"""By what follows the name of the recorded call: the weights, and from standard normal and recorded
values to those of the twin."""


def with_twins(recorded: Sequence[Workload], seed: int) -> list[Workload]:
    """Follow each call by a twin of each kind."""
    return [
        each
        for number, workload in enumerate(recorded)
        for each in (workload, *(twin(workload, kind, seed + number) for kind in KINDS))
    ]


def twin(recorded: Workload, kind: str, seed: int) -> Workload:
    """Replace the query, key and value of a recorded call by random ones of one of `KINDS`."""
    weights, shaped = KINDS[kind]

    def load(device: torch.device) -> AttentionCall:
        call = recorded.load(device)
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

    source = {"kind": "twin", "of": recorded.source, "values": kind, "seed": seed}
    return Workload(f"{recorded.name}-{kind}", load, source if recorded.source else {})
