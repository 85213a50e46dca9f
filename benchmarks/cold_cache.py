"""Compares ways to empty a GPU's L2 cache before a kernel is timed (needs a GPU; half a minute).

    python -m benchmarks.cold_cache [--out FILE]

Microbenchmarks write a large buffer before each sample, so that the kernel's inputs are not cached.
The end of the buffer is still in the cache, and is written to memory while the kernel runs.
`written` is a call's time after such a write, `read` after reading a buffer, as in `replay`, and
`layer` after the products of a model's MLP, whose weights are larger than the cache. The three take
turns in shuffled rounds. Writes `benchmarks/results/cold_cache.csv`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import MACHINE, write_measured
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

ROUNDS = 30
BYTES = 2**28
"""Size in bytes of the buffer that is written or read: five times an H100's L2 cache."""
HIDDEN, INSIDE = 4096, 11008
"""Sizes of Llama-2-7b's MLP."""
WAIT_CYCLES = 2_000_000
"""GPU cycles to wait until the host has enqueued a sample."""

CALLS = {
    "decode 1×32×4096": Spec(1, 32, 32, 1, 4096, 128, 128),
    "decode 8×32/8×4096": Spec(8, 32, 8, 1, 4096, 128, 128),
    "decode 8×64/16×1024×64": Spec(8, 64, 16, 1, 1024, 64, 64),
    "1×32/8×1024 causal": Spec(1, 32, 8, 1024, 1024, 128, 128, is_causal=True),
    "16×32×512 causal": Spec(16, 32, 32, 512, 512, 128, 128, is_causal=True),
    "8×12×77×64": Spec(8, 12, 12, 77, 77, 64, 64),
    "1×24×4608": Spec(1, 24, 24, 4608, 4608, 128, 128),
}
KERNELS = {1: ("torch-cudnn", "torch-flash", "triton-decode")}
OTHERS = ("torch-cudnn", "torch-flash", "triton-fa3")
"""Kernels for calls with more than one query."""

BEHIND = ("written", "read", "layer")
COLUMNS = (
    "call",
    "kernel",
    *(f"{name}, µs" for name in BEHIND),
    *(f"{name} / layer" for name in BEHIND[:2]),
    *MACHINE,
)


def main() -> None:
    write_measured(__doc__, "cold_cache.csv", COLUMNS, lines)


def lines(_: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of each kernel on each call."""
    before = _before(device)
    for name, spec in CALLS.items():
        call = spec.call(device, torch.Generator(device).manual_seed(0))
        for kernel in map(find, KERNELS.get(spec.q_len, OTHERS)):
            if kernel.unavailable(device) is not None or kernel.refuses(call) is not None:
                continue
            times = measure(partial(kernel.attention, **call.arguments()), before)
            shares = {each: times[each] / times["layer"] for each in BEHIND[:2]}
            yield {
                "call": name,
                "kernel": kernel.name,
                **{f"{each}, µs": time for each, time in times.items()},
                **{f"{each} / layer": share for each, share in shares.items()},
            }


def _before(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the functions that run before a call, by name."""
    buffer = torch.zeros(BYTES // 4, device=device)
    weights = [
        torch.full(shape, 0.01, dtype=torch.bfloat16, device=device)
        for shape in ((HIDDEN, INSIDE), (INSIDE, HIDDEN)) * 2
    ]
    hidden = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=device)

    def layer() -> Tensor:
        x = hidden
        for weight in weights:
            x = x @ weight
        return x

    return {"written": buffer.zero_, "read": buffer.sum, "layer": layer}


def measure(run: Callable[[], Tensor], before: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median µs of a call after each of these functions."""
    for _ in range(3):
        run()
    samples: dict[str, list[float]] = {name: [] for name in before}
    order, shuffle = list(before), random.Random(0)
    for _ in range(ROUNDS):
        shuffle.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(WAIT_CYCLES)
            before[name]()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(1000 * begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in samples.items()}


if __name__ == "__main__":
    main()
