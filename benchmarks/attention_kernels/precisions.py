"""Times `attention` in each precision, for calls of many sizes (needs a Hopper GPU; two minutes).

    python -m benchmarks.attention_kernels.precisions [--out FILE]

The precisions of a call take turns in shuffled rounds with a cold L2. The times in 8 bits include
the quantisation. `attention_kernels.dispatch.is_faster_in_8_bits` follows from the ratios. Writes
`benchmarks/results/precisions.csv`, a line for each call.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from attention_kernels import dispatch
from attention_kernels.operators import attention
from attention_kernels.options import PLAIN
from benchmarks.gpu import MACHINE, timed, write_measured
from replay.workloads.random_calls import Spec

ROUNDS = 7
PRECISIONS = ("exact", "fp8", "int8")
HEADS = {64: 32, 128: 16, 256: 8}
"""Number of query heads for each head dimension."""
COLUMNS = (
    "head_dim",
    "batch",
    "q_heads",
    "kv_heads",
    "q_len",
    "kv_len",
    "is_causal",
    *(f"{precision}, ms" for precision in PRECISIONS),
    "fp8 / exact",
    "int8 / exact",
    "fastest",
    *MACHINE,
)


def calls() -> list[Spec]:
    """Return self-attention and chunks of many sizes, with and without shared keys."""
    found = []
    for head_dim, heads in HEADS.items():
        for length in (1024, 2048, 4096, 8192, 16384):
            for is_causal in (False, True):
                for group in (1, 8):
                    sizes = (heads, heads // group, length, length, head_dim, head_dim)
                    found.append(Spec(1, *sizes, is_causal=is_causal))
        chunk = (heads, heads // 8, 1024, 32768, head_dim, head_dim)
        text = (heads, heads, 16384, 512, head_dim, head_dim)
        found += [Spec(1, *chunk), Spec(1, *text)]
    return found


def main() -> None:
    write_measured(__doc__, "precisions.csv", COLUMNS, lines)


def lines(_: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of each call."""
    for spec in calls():
        yield line(spec, device)


def line(spec: Spec, device: torch.device) -> dict[str, Any]:
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    runs = {
        precision: functools.partial(attention, **call.arguments(), precision=precision)
        for precision in PRECISIONS
    }
    samples = timed(runs, device, ROUNDS, 0.1)
    ms = {name: statistics.median(sample.ms) for name, sample in samples.items()}
    is_8_bit = dispatch.is_faster_in_8_bits(call.query, call.key, PLAIN)
    return (
        {name: getattr(spec, name) for name in COLUMNS[:7]}
        | {f"{name}, ms": each for name, each in ms.items()}
        | {f"{name} / exact": ms[name] / ms["exact"] for name in ("fp8", "int8")}
        | {"fastest": int(is_8_bit)}
    )


if __name__ == "__main__":
    main()
