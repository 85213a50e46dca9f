"""Times `attention` with and without `invariant=True` (needs a Hopper GPU; one minute).

    python -m benchmarks.attention_kernels.invariance [--part KEYS ...] [--out FILE]

Both take turns in shuffled rounds with a cold L2. A ratio above 1 is the price of invariance, with
its 95 % interval. `--part` also times decode with parts of these numbers of keys. Writes
`benchmarks/results/invariance.csv`, a line for each call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.split_kv import attend_to_cache, planned
from attention_kernels.operators import attention
from attention_kernels.options import INVARIANT, PLAIN, AttentionOptions
from benchmarks import results
from benchmarks.gpu import gpu
from capture.call.attention_call import AttentionCall
from replay.timing.machine import describe
from replay.timing.rounds import measure
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
    "part",
    "plain, ms",
    "invariant, ms",
    "invariant / plain",
    "low",
    "high",
    "machine.device",
    "machine.torch",
    "machine.triton",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", type=int, nargs="+", default=[], metavar="KEYS")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "invariance.csv")
    arguments = parser.parse_args()
    device = gpu()
    machine = describe(device)
    fields = {name: getattr(machine, name.partition(".")[2]) for name in COLUMNS[-3:]}
    lines: list[dict[str, Any]] = []
    for spec in (*PREFILL, *DECODE):
        for line in timed(spec, arguments.part, device):
            lines.append(line | fields)
            results.write_lines(lines, COLUMNS, arguments.out)
            cells = (results.cell(line[name]) for name in COLUMNS[:-3])
            print(*cells, sep="\t", flush=True)


def timed(spec: Spec, parts: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the lines of a call: one for the plan, and for decode one for each part's size."""
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    options = AttentionOptions(bottom_right=True) if spec.is_causal else PLAIN
    attend = partial(attention, **call.arguments(), options=options)
    runs: dict[int | str, Callable[[], Tensor]] = {
        "plain": attend,
        "": partial(attend, invariant=True),
    }
    if spec.q_len == 1:
        runs |= {part: decode_in_parts(call, part) for part in parts}
    samples = measure(runs, device, cache="cold", rounds=ROUNDS, max_seconds=0.5)
    for sample in samples.values():
        if sample.error is not None:
            raise sample.error
    plain = samples.pop("plain").ms
    for part, sample in samples.items():
        speedup = paired_speedup(sample.ms, plain)
        yield {name: getattr(spec, name) for name in SIZES} | {
            "part": part,
            "plain, ms": statistics.median(plain),
            "invariant, ms": statistics.median(sample.ms),
            "invariant / plain": speedup.ratio,
            "low": speedup.low,
            "high": speedup.high,
        }


def decode_in_parts(call: AttentionCall, part: int) -> Callable[[], Tensor]:
    """Return invariant decode with parts of this number of keys."""
    cache = Cache(call.key, call.value)
    tiling = planned(call.query, cache, options=INVARIANT).tiling
    tiling = tiling._replace(part=part, splits=-(-call.shape.kv_len // part))
    return partial(attend_to_cache, call.query, cache, options=INVARIANT, tiles=tiling)


if __name__ == "__main__":
    with torch.no_grad():
        main()
