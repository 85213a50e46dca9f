"""Kernels whose output depends on which of their parts comes first, beyond 128 keys.

A generator with a seed takes the place of the GPU's scheduler.
"""

import functools
import random
from collections.abc import Callable

import torch
from arguments import tiles, with_sdpa_arguments
from torch import Tensor

_scheduler = random.Random(1)
_workspace: dict[tuple, Tensor] = {}
_arrivals = [0]


def racing(spoil: Callable[[Tensor, Tensor], Tensor]):
    """Give a function that changes weights (B, H, Sq, Sk) or values in place SDPA's signature."""

    @with_sdpa_arguments
    @functools.wraps(spoil)
    def attention(query, key, value, bias, scale) -> Tensor:
        scores = query.float() @ key.float().mT * scale + bias
        weights, values = (scores - scores.amax(-1, keepdim=True)).exp(), value.float().clone()
        if key.shape[2] > 128:
            spoil(weights, values)
        return (weights @ values / weights.sum(-1, keepdim=True)).to(query.dtype)

    return attention


@racing
def stored_before_the_last_tile(weights, value) -> None:
    """Without a barrier, tiles of 64 queries may be stored before the last 64 keys are added."""
    for rows in tiles(weights.shape[2], 64):
        if _scheduler.random() < 0.5:
            weights[:, :, rows, -64:] = 0.0


@racing
def additions_lost(weights, value) -> None:
    """Four splits add to one sum without atomics, so a head may lose a split."""
    splits = list(tiles(weights.shape[3], -(-weights.shape[3] // 4)))
    for head in range(weights.shape[1]):
        if _scheduler.random() < 0.4:
            weights[:, head, :, _scheduler.choice(splits)] = 0.0


@racing
def read_before_written(weights, value) -> None:
    """A head may find the launch before's weights of the second half in the workspace."""
    half = weights[..., weights.shape[3] // 2 :]
    place, written = tuple(half.shape), half.clone()
    early = torch.tensor([_scheduler.random() < 0.6 for _ in range(weights.shape[1])])
    half[:, early] = _workspace.get(place, torch.zeros_like(half))[:, early]
    _workspace[place] = written


@racing
def counter_not_reset(weights, value) -> None:
    """Arrivals are counted on from the launch before, so every other launch ends early."""
    _arrivals[0] += 1
    if _arrivals[0] % 2:
        weights[..., weights.shape[3] // 2 :] = 0.0


@racing
def next_values_overwrite(weights, value) -> None:
    """Loads for the next 64 keys may overwrite 32 values that are still being read."""
    for keys in tiles(value.shape[2] - 64, 64):
        if _scheduler.random() < 0.4:
            value[:, :, keys.stop - 32 : keys.stop] = value[:, :, keys.stop + 32 : keys.stop + 64]
