"""Block-sparse kernels that can be tuned for each head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from capture.call.attention_call import AttentionCall
from replay.distribution.time_limit import TimeLimit
from replay.kernels.libraries import imported
from replay.kernels.registry import find
from replay.sparsity.pace import FEW, Pace, pace_of
from replay.sparsity.settings import named

LEAST_BLOCKS = 4
"""Smallest number of blocks of keys among which a choice is worth its time."""


def _sizes(call: AttentionCall) -> tuple[int, int]:
    block_sizes = imported("attention_kernels.sparse.block_sparse", "block_sizes")
    rows, keys = block_sizes(call.query, call.key, call.value)
    return rows, keys


@dataclass(frozen=True)
class SparseKernel:
    """Kernel with the options `keep` and `mass` of `triton-block-sparse`, and how to examine it."""

    name: str = "triton-block-sparse"
    """Name without options."""
    block_sizes: Callable[[AttentionCall], tuple[int, int]] = _sizes
    """Function that returns the number of queries in a tile and of keys in a block."""
    pace: Callable[[AttentionCall, str, str, int, TimeLimit], Pace] = pace_of
    """Function that times the kernel on a call."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return the reason why the kernel cannot run on a device, or None."""
        return find(self.name).unavailable(device)

    def refuses(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernel cannot or need not run a call, or None."""
        if (reason := find(named(self.name, "keep", [FEW])).refuses(call)) is not None:
            return reason
        rows, keys = self.block_sizes(call)
        if call.shape.q_len < rows or call.shape.kv_len < LEAST_BLOCKS * keys:
            return f"is shorter than {rows} queries or {LEAST_BLOCKS * keys} keys"
        return None
