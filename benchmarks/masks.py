"""Compares kernels on calls with masks, on random values (needs a GPU).

    python -m benchmarks.masks [--out FILE]

Times a bool mask that excludes every third pair and a float mask that adds a number to each pair,
compared with the same call without a mask, at two head dimensions and in a small call. Also times
dense masks of causal documents, which keep an eighth of the causal pairs visible. Writes
`benchmarks/results/masks.csv` and prints its table.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import gpu
from benchmarks.sweep import Sweeps, parser, sweep_all
from benchmarks.tables.speed import by_call
from replay.workloads.random_calls import Spec

KERNELS = (
    "torch-default,torch-efficient,torch-cudnn,triton-fa2,triton-fa3,triton-fp8,triton-masked,flex"
)

WIDE = Spec(1, 24, 24, 4096, 4096, 128, 128)
NARROW = Spec(1, 24, 24, 4096, 4096, 64, 64)
SMALL = Spec(1, 16, 16, 400, 500, 64, 64)
CAUSAL = Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True)


def hiding(spec: Spec) -> dict[str, Any]:
    """Return a bool mask that excludes every third (query, key) pair."""
    hidden = torch.rand(spec.q_len, spec.kv_len, generator=torch.Generator().manual_seed(1)) < 1 / 3
    return {"attn_mask": ~hidden[None, None]}


def adding(spec: Spec) -> dict[str, Any]:
    """Return a mask that adds a number to every score."""
    bias = torch.randn(spec.q_len, spec.kv_len, generator=torch.Generator().manual_seed(1))
    return {"attn_mask": bias[None, None].to(torch.bfloat16)}


def _documents(spec: Spec, *, is_float: bool) -> dict[str, Any]:
    """Return eight documents of equal length as a dense causal mask, without other options."""
    position = torch.arange(spec.q_len)
    mask = position[:, None] >= position
    mask &= position[:, None] * 8 // spec.q_len == position * 8 // spec.q_len
    if is_float:
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
    return {"attn_mask": mask[None, None], "is_causal": False}


SWEEPS: Sweeps = {
    KERNELS: {
        "4k-128": (WIDE, {}),
        "4k-128-hiding": (WIDE, hiding(WIDE)),
        "4k-128-adding": (WIDE, adding(WIDE)),
        "4k-64": (NARROW, {}),
        "4k-64-hiding": (NARROW, hiding(NARROW)),
        "4k-64-adding": (NARROW, adding(NARROW)),
        "small": (SMALL, {}),
        "small-hiding": (SMALL, hiding(SMALL)),
        "8k-causal": (CAUSAL, {}),
        "8k-documents": (CAUSAL, _documents(CAUSAL, is_float=False)),
        "8k-documents-adding": (CAUSAL, _documents(CAUSAL, is_float=True)),
    },
}


def main() -> None:
    arguments = parser(__doc__, "", "masks.csv", seconds=0.5).parse_args()
    gpu()
    sweep_all(SWEEPS, arguments)
    print(by_call(arguments.out))


if __name__ == "__main__":
    main()
