"""Compares the cost of a visible pair with its cost in a plain call (needs a GPU).

    python -m benchmarks.attention_kernels.per_pair [--kernels NAMES] [--out FILE]

Calls with windows, soft caps, sinks, masks, queries that follow cached keys, and packed sequences
each take turns with a plain call in shuffled rounds, because a GPU at its power limit changes its
clock. Writes `benchmarks/results/per_pair.csv`, for drop-ins and cores, and prints its table.
Outputs are checked by `benchmarks.variants`, `benchmarks.masks` and the tests.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on, timed
from benchmarks.masks import NARROW, WIDE, adding, hiding
from benchmarks.tables.speed import per_pair
from benchmarks.variants import (
    BEHIND_CACHE,
    BOTTOM_RIGHT,
    GEMMA,
    GPT_OSS,
    LLAMA_8K,
    LLAMA_32K,
    LONG_WINDOW,
    SHORT_WINDOW,
    SOFT_CAP,
    WINDOW,
    packed,
    sinks,
)
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import find, select
from replay.timing.flops import valid_pairs
from replay.workloads.random_calls import Spec

KERNELS = (
    "triton-fa2,triton-fa3,triton-varlen,triton-fp8,triton-fp8[accum=tensor],triton-sage-fp8,fa2"
)
BESIDE = {"triton-varlen": "triton-fa3"}
"""Kernel that runs the plain call for a kernel that cannot; both use the same program."""
ROUNDS = 15
FOUR_OF_2K = Spec(4, 32, 8, 2048, 2048, 128, 128, is_causal=True)
Fields = Mapping[str, Any]
"""Sizes of each call, by name."""


def _side_by_side(call: AttentionCall) -> Fields:
    """Return a batch's sequences concatenated, as in a packed call."""
    lengths = [call.query.shape[2]] * call.query.shape[0]
    tensors = {
        name: getattr(call, name).transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
        for name in ("query", "key", "value")
    }
    return tensors | packed(lengths)


GROUPS: dict[str, tuple[Spec, dict[str, Callable[[AttentionCall], Fields]]]] = {
    "8k": (LLAMA_8K, {"window-1024": lambda _: WINDOW, "soft-cap": lambda _: SOFT_CAP}),
    "32k": (LLAMA_32K, {"window-4096": lambda _: LONG_WINDOW}),
    "8k-gpt-oss": (
        GPT_OSS,
        {
            "sinks": lambda _: sinks(64),
            "window-1024": lambda _: WINDOW,
            "sinks-window-128": lambda _: {**sinks(64), **SHORT_WINDOW},
        },
    ),
    "8k-gemma": (GEMMA, {"soft-cap": lambda _: SOFT_CAP, "window-1024": lambda _: WINDOW}),
    "1k-of-16k": (BEHIND_CACHE, {"bottom-right": lambda _: BOTTOM_RIGHT}),
    "4x2k": (FOUR_OF_2K, {"packed": _side_by_side}),
    "4k-128": (WIDE, {"hiding": lambda _: hiding(WIDE), "adding": lambda _: adding(WIDE)}),
    "4k-64": (NARROW, {"hiding": lambda _: hiding(NARROW), "adding": lambda _: adding(NARROW)}),
}
"""Plain calls, and the extra fields of the calls compared with them."""

COLUMNS = (
    "call",
    "beside",
    "kernel",
    "part",
    "ms",
    "plain, ms",
    "pairs",
    "plain, pairs",
    "time per pair",
    "low",
    "high",
    *MACHINE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", default=KERNELS)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "per_pair.csv")
    arguments = parser.parse_args()
    device = gpu()
    machine = measured_on(device)
    lines: list[dict[str, Any]] = []
    for name in arguments.only:
        spec, others = GROUPS[name]
        plain = spec.call(device, torch.Generator(device).manual_seed(0))
        calls = {
            f"{name}-{asked}": _on(device, replace(plain, **fields(plain)))
            for asked, fields in others.items()
        }
        for line in compare(name, plain, calls, arguments.kernels, device):
            lines.append(line | machine)
            results.write_lines(lines, COLUMNS, arguments.out)
    print(per_pair(arguments.out))


def compare(
    name: str,
    plain: AttentionCall,
    calls: Mapping[str, AttentionCall],
    kernels: str,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Return a line for each kernel, part and call, compared with the plain call."""
    pairs = {each: valid_pairs(call) for each, call in {name: plain, **calls}.items()}
    for kernel in select(kernels)[0]:
        taken = {each: call for each, call in calls.items() if kernel.refuses(call) is None}
        of_plain = find(BESIDE[kernel.name]) if kernel.name in BESIDE else kernel
        is_out = kernel.unavailable(device) is not None or of_plain.refuses(plain) is not None
        if is_out or not taken:
            continue
        candidates: dict[tuple[str, str], Callable[[], Any]] = {}
        for each, call in {name: plain, **taken}.items():
            by = of_plain if each == name else kernel
            candidates[each, "drop-in"] = partial(by.attention, **call.arguments())
            if kernel.prepare is not None and of_plain is kernel:
                candidates[each, "core"] = kernel.prepare(call)
        samples = timed(candidates, device, ROUNDS, 0.4)
        for (each, part), sample in samples.items():
            if each == name:
                continue
            beside = samples[name, part].ms
            ratios = [
                ms / pairs[each] / (own / pairs[name])
                for ms, own in zip(sample.ms, beside, strict=False)
            ]
            low, _, high = statistics.quantiles(ratios, n=4)
            yield {
                "call": each,
                "beside": name,
                "kernel": kernel.name,
                "part": part,
                "ms": statistics.median(sample.ms),
                "plain, ms": statistics.median(beside),
                "pairs": pairs[each],
                "plain, pairs": pairs[name],
                "time per pair": statistics.median(ratios),
                "low": low,
                "high": high,
            }


def _on(device: torch.device, call: AttentionCall) -> AttentionCall:
    """Copy a call to a device, including tensors other than query, key and value."""
    beyond = {
        field: tensor.to(device)
        for field in ("attn_mask", "sinks", "cu_seqlens_q", "cu_seqlens_k")
        if (tensor := getattr(call, field)) is not None
    }
    return replace(call, **beyond)


if __name__ == "__main__":
    with torch.no_grad():
        main()
