"""Times `attention` with and without `invariant=True` (needs a Hopper GPU; one minute).

    python -m benchmarks.attention_kernels.invariance [--out FILE]

Both take turns in shuffled rounds with a cold L2. A ratio above 1 is the price of invariance, with
its 95 % interval. Decode runs a third time with the bits of prefill (`decode=False`). Writes
`benchmarks/results/invariance.csv`, a line for each call.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attention_kernels.operators import attention
from attention_kernels.options import PLAIN, AttentionOptions
from benchmarks.gpu import MACHINE, timed, write_measured
from replay.timing.statistics import paired_speedup
from replay.workloads.random_calls import Spec

ROUNDS = 20
PREFILL = (
    Spec(1, 32, 32, 4096, 4096, 128, 128, is_causal=True),
    Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True),
    Spec(1, 24, 24, 4608, 4608, 128, 128),
    Spec(1, 32, 8, 1000, 16384, 128, 128, is_causal=True),
    Spec(4, 16, 16, 2048, 2048, 256, 256, is_causal=True),
    Spec(1, 32, 8, 4096, 4096, 64, 64, is_causal=True),
    Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True),
    Spec(2, 30, 30, 17776, 17776, 64, 64),
)
DECODE = (
    Spec(1, 32, 8, 1, 4096, 128, 128),
    Spec(1, 32, 8, 1, 32768, 128, 128),
    Spec(1, 32, 8, 1, 131072, 128, 128),
    Spec(8, 32, 8, 1, 4096, 128, 128),
    Spec(8, 32, 8, 1, 32768, 128, 128),
    Spec(64, 32, 8, 1, 2048, 128, 128),
    Spec(64, 32, 8, 1, 8192, 128, 128),
    Spec(16, 64, 8, 1, 8192, 64, 64),
)
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "is_causal")
COLUMNS = (
    *SIZES,
    "plain, ms",
    "invariant, ms",
    "invariant / plain",
    "low",
    "high",
    "with prefill's bits, ms",
    "with prefill's bits / plain",
    *MACHINE,
)


def main() -> None:
    write_measured(__doc__, "invariance.csv", COLUMNS, lines)


def lines(_: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of each call."""
    for spec in (*PREFILL, *DECODE):
        yield line(spec, device)


def line(spec: Spec, device: torch.device) -> dict[str, Any]:
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    options = AttentionOptions(bottom_right=True) if spec.is_causal else PLAIN
    plain = partial(attention, **call.arguments(), options=options)
    runs = {"plain": plain, "invariant": partial(plain, invariant=True)}
    if spec.q_len == 1:
        alike = AttentionOptions(bottom_right=True, invariant=True, decode=False)
        runs["with prefill's bits"] = partial(attention, **call.arguments(), options=alike)
    samples = timed(runs, device, ROUNDS, 0.5)
    found = {name: getattr(spec, name) for name in SIZES}
    found |= {f"{name}, ms": statistics.median(sample.ms) for name, sample in samples.items()}
    first, *others = samples
    prices = {name: paired_speedup(samples[name].ms, samples[first].ms) for name in others}
    found |= {f"{name} / plain": price.ratio for name, price in prices.items()}
    return found | {"low": prices["invariant"].low, "high": prices["invariant"].high}


if __name__ == "__main__":
    main()
