"""Time of a block-sparse kernel, as a function of the share of the blocks that it visits.

The time of the kernel is nearly linear in the number of visited blocks. Two shares are timed beside
the model's own attention, on one call of each form.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import NamedTuple

from capture.call.attention_call import AttentionCall
from replay.distribution.time_limit import TimeLimit
from replay.kernels.registry import find
from replay.sparsity.settings import DENSE, named
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.rounds import measure
from replay.timing.timer import Cache, first_call

FEW = 0.25
"""Smaller share that is timed; the larger one is all blocks."""

ROUNDS = 11
SECONDS = 1.0
"""Longest time of a kernel's samples."""


class Pace(NamedTuple):
    """Time of the kernel over that of the model's own attention: fixed + per_block · density."""

    fixed: float
    """Share for the choice of blocks and the launch."""
    per_block: float

    def ratio(self, density: float) -> float:
        return self.fixed + self.per_block * density


def pace_of(call: AttentionCall, kernel: str, own: str, keys: int, limit: TimeLimit) -> Pace:
    """Time a kernel on a call at two densities, beside the model's own attention.

    Args:
        kernel: name of the kernel without options; it has an option `keep`.
        own: name of the kernel that the model itself runs.
        keys: number of keys in a block.
        limit: time limit.

    Raises:
        TimeoutError: there is no time for the samples.
        Exception: a kernel failed.
    """
    names = {share: named(kernel, "keep", [share]) for share in (FEW, DENSE)} | {0.0: own}
    runs = {
        share: partial(find(name).attention, **call.arguments()) for share, name in names.items()
    }
    ms = 0.0
    for _ in range(2):  # the first call may compile
        if limit.left:
            _, ms = first_call(runs[FEW], call.device)
    # Each share has a call to warm up besides its samples, and all blocks take the longest.
    if not limit.allows((1 + 1 / FEW) * (1 + MINIMUM_ROUNDS) * ms / 1000):
        raise TimeoutError
    cache: Cache = "cold" if call.device.type == "cuda" else "warm"
    samples = measure(runs, call.device, cache=cache, rounds=ROUNDS, max_seconds=SECONDS)
    for each in samples.values():
        if each.error is not None:
            raise each.error
    few, whole, own_ms = (statistics.median(samples[share].ms) for share in (FEW, DENSE, 0.0))
    blocks = -(-call.shape.kv_len // keys)
    visited = max(int(FEW * blocks + 0.5), 1) / blocks
    per_block = (whole - few) / own_ms / (1 - visited)
    return Pace(whole / own_ms - per_block, per_block)
