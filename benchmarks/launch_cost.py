"""Measures the host time of a call of each kernel (needs a GPU; a minute, mostly compiling).

    python -m benchmarks.launch_cost [--out FILE]

Calls are small, so that the host never waits for the GPU. `back to back` is the time of a call in a
loop; `among other work` is the time of a call after a layer of other PyTorch calls, as in a model,
where the processor's caches hold other data. All calls and kernels take turns in shuffled rounds. A
kernel's core has a separate line. `attention_kernels` is the library's function `attention`.
Writes `benchmarks/results/launch_cost.csv`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_kernels.operators import attention
from benchmarks.gpu import MACHINE, write_measured
from capture.call.attention_call import AttentionCall
from replay.kernels.adapters.triton_decode import paged
from replay.kernels.registry import select
from replay.workloads.random_calls import Spec

PEERS = "torch-default,torch-flash,torch-cudnn"
PREFILL = f"{PEERS},triton-fa2,triton-fa3,triton-sage,triton-fp8,triton-sage-fp8"
DECODE = f"{PEERS},triton-decode"
ROUNDS, IN_A_ROW = 40, 20
Part = tuple[str, str, str]
"""Call, kernel, and the kernel's part: the drop-in or the core."""

COLUMNS = (
    "call",
    "kernel",
    "part",
    "back to back, µs",
    "among other work, µs",
    *MACHINE,
)


def main() -> None:
    write_measured(__doc__, "launch_cost.csv", COLUMNS, lines)


def lines(_: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of each part of a kernel on each call."""
    parts: dict[Part, Callable[[], Tensor]] = {}
    for name, (names, call) in calls(device).items():
        if "torch-default" in names:
            parts[name, "attention_kernels", "drop-in"] = partial(attention, **call.arguments())
        for kernel in select(names)[0]:
            if kernel.unavailable(device) is not None or kernel.refuses(call) is not None:
                continue
            parts[name, kernel.name, "drop-in"] = partial(kernel.attention, **call.arguments())
            if kernel.prepare is not None:
                parts[name, kernel.name, "core"] = kernel.prepare(call)
    for (name, kernel_name, part), (alone, among) in measure(parts, Layer(device)).items():
        yield {
            "call": name,
            "kernel": kernel_name,
            "part": part,
            "back to back, µs": alone,
            "among other work, µs": among,
        }


def calls(device: torch.device) -> dict[str, tuple[str, AttentionCall]]:
    """Return calls of prefill, decode, key lengths and paged keys, each with kernels to time."""
    generator = torch.Generator(device).manual_seed(0)
    prefill = Spec(1, 8, 2, 256, 256, 128, 128, is_causal=True).call(device, generator)
    long = Spec(1, 32, 32, 1, 2048, 128, 128).call(device, generator)
    decode = Spec(1, 8, 2, 1, 512, 128, 128).call(device, generator)
    lengths = torch.full((1,), decode.shape.kv_len, dtype=torch.int32, device=device)
    cache = paged(decode, 64)[0]
    pages = replace(
        decode,
        key=cache.key_pages.transpose(1, 2),
        value=cache.value_pages.transpose(1, 2),
        page_table=cache.block_table,
        seqused_k=cache.lengths,
    )
    return {
        "1×8/2×256×128 causal": (PREFILL, prefill),
        "1×8/2×1/512×128": (f"{DECODE},triton-sparse-decode", decode),
        "1×32×1/2048×128": (DECODE, long),
        "1×8/2×1/512×128 lengths": (
            "triton-decode,triton-varlen",
            replace(decode, seqused_k=lengths),
        ),
        "1×8/2×1/512×128 pages": ("triton-paged-decode", pages),
    }


class Layer:
    """A transformer layer without attention, on small tensors."""

    def __init__(self, device: torch.device) -> None:
        self._x = torch.randn(1, 1, 64, device=device, dtype=torch.bfloat16)
        self._linear = torch.nn.Linear(64, 64, device=device, dtype=torch.bfloat16)
        self._norm = torch.nn.RMSNorm(64, device=device, dtype=torch.bfloat16)

    def __call__(self) -> None:
        x = self._norm(self._x)
        query, key, value = (self._linear(x) for _ in range(3))
        query, key = (torch.cat((-y[..., 32:], y[..., :32]), -1) * y + y for y in (query, key))
        x = self._norm(self._linear(query + key + value) + x)
        self._linear(torch.nn.functional.silu(self._linear(x)) * self._linear(x))


def measure(
    parts: dict[Part, Callable[[], Tensor]], layer: Callable[[], None]
) -> dict[Part, tuple[float, float]]:
    """Return the median µs of a call back to back, and among other work."""
    for run in parts.values():
        for _ in range(3):
            run()
    alone: dict[Part, list[float]] = {part: [] for part in parts}
    among: dict[Part, list[float]] = {part: [] for part in parts}
    order, shuffle = list(parts), random.Random(0)
    for _ in range(ROUNDS):
        shuffle.shuffle(order)
        for part in order:
            run = parts[part]
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(IN_A_ROW):
                run()
            alone[part].append((time.perf_counter_ns() - began) / IN_A_ROW / 1000)
            torch.cuda.synchronize()
            layer()
            began = time.perf_counter_ns()
            run()
            among[part].append((time.perf_counter_ns() - began) / 1000)
    return {
        part: (statistics.median(alone[part]), statistics.median(among[part])) for part in parts
    }


if __name__ == "__main__":
    main()
