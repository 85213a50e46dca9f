"""Measures 8-bit kernels' errors by number of keys, with PV summed in float32 or tensor cores.

    python -m benchmarks.accumulation [--out FILE]

The tensor cores accumulate FP8 products with about 14 bits. `[accum=tensor]`, like FlashAttention 3
and cuDNN, accumulates all blocks of keys in the tensor cores; the other kernels add the blocks in
float32. Queries, keys and values are standard normal. Values are also shifted to mean 1, with which
the sums grow with the length. The error is |output - reference| over |reference|, each summed over
the output; the reference is in float64. Writes `benchmarks/results/accumulation.csv`. Needs a GPU
for a few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import MACHINE, write_measured
from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.kernels.registry import find

KERNELS = (
    "triton-fa3",
    "triton-sage",
    "triton-fp8",
    "triton-fp8[accum=tensor]",
    "triton-sage-fp8",
    "triton-sage-fp8[accum=tensor]",
    "cudnn-fp8",
)
LENGTHS = tuple(1024 * 2**n for n in range(8))
MEANS = (0, 1)
HEADS, QUERIES, HEAD_DIM = 4, 256, 128

COLUMNS = (
    "kernel",
    "mean of the values",
    "keys",
    "relative L1",
    *MACHINE,
)


def main() -> None:
    write_measured(__doc__, "accumulation.csv", COLUMNS, errors)


def errors(_: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of each kernel, mean and length."""
    for mean in MEANS:
        for length in LENGTHS:
            call = _call(length, mean, device)
            expected = attention(call)
            for name in KERNELS:
                kernel = find(name)
                if kernel.unavailable(device) is not None or kernel.refuses(call) is not None:
                    continue
                error = kernel.attention(**call.arguments()).double() - expected
                yield {
                    "kernel": name,
                    "mean of the values": mean,
                    "keys": length,
                    "relative L1": float(error.abs().sum() / expected.abs().sum()),
                }


def _call(length: int, mean: int, device: torch.device) -> AttentionCall:
    generator = torch.Generator(device).manual_seed(length)

    def normal(tokens: int) -> Tensor:
        shape = (1, HEADS, tokens, HEAD_DIM)
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    return AttentionCall(normal(QUERIES), normal(length), normal(length) + mean)


if __name__ == "__main__":
    main()
