"""Compares measured and predicted times of calls with head_dim 64 (needs a GPU).

    python -m benchmarks.attention_kernels.narrow_heads [--only NAME ...] [--out FILE]

Times cuDNN, `triton-fa3`, and `triton-fa3` forced to 4, 3 and 2 consumers, in shuffled rounds with
a cold L2. Reports the number of consumers that the schedule chooses, and the predicted time of
each. The predictions (`schedule.NARROW`) are fitted to these measurements. Writes
`benchmarks/results/narrow_heads.csv`, a line for each call, and prints its table. The tests check
the outputs.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import MACHINE, timed, write_measured
from benchmarks.tables.speed import narrow_heads
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

ROUNDS = 11
D = 64
CALLS = {
    "SDXL, 1024 px, inner": Spec(2, 20, 20, 1024, 1024, D, D),
    "SDXL, 1024 px, outer": Spec(2, 10, 10, 4096, 4096, D, D),
    "SDXL, text, inner": Spec(2, 20, 20, 1024, 77, D, D),
    "SDXL, text, outer": Spec(2, 10, 10, 4096, 77, D, D),
    "SD 3.5 Large": Spec(2, 38, 38, 4250, 4250, D, D),
    "CogVideoX-2b": Spec(2, 30, 30, 17776, 17776, D, D),
    "CLIP text, batch 2": Spec(2, 20, 20, 77, 77, D, D, is_causal=True),
    "CLIP text, batch 32": Spec(32, 12, 12, 77, 77, D, D, is_causal=True),
    "ViT-L/14, batch 64": Spec(64, 16, 16, 257, 257, D, D),
    "ViT-L/14, 336 px": Spec(1, 16, 16, 577, 577, D, D),
    "ViT-B/16, batch 8": Spec(8, 12, 12, 197, 197, D, D),
    "DINOv2-L, 518 px, batch 2": Spec(2, 16, 16, 1370, 1370, D, D),
    "SigLIP, batch 8": Spec(8, 16, 16, 729, 729, D, D),
    "BERT, batch 16": Spec(16, 12, 12, 512, 512, D, D),
    "BERT, 128 tokens, batch 64": Spec(64, 12, 12, 128, 128, D, D),
    "Whisper encoder": Spec(1, 20, 20, 1500, 1500, D, D),
    "Whisper encoder, batch 8": Spec(8, 20, 20, 1500, 1500, D, D),
    "Whisper decoder, batch 8": Spec(8, 20, 20, 448, 448, D, D, is_causal=True),
    "GPT-2, batch 8": Spec(8, 12, 12, 1024, 1024, D, D, is_causal=True),
    "Llama-3.2-1B, 512": Spec(4, 32, 8, 512, 512, D, D, is_causal=True),
    "Llama-3.2-1B, 1024": Spec(1, 32, 8, 1024, 1024, D, D, is_causal=True),
    "Llama-3.2-1B, 3000": Spec(1, 32, 8, 3000, 3000, D, D, is_causal=True),
    "gpt-oss-20b, 1024": Spec(1, 64, 8, 1024, 1024, D, D, is_causal=True),
    "8 heads": Spec(1, 8, 8, 4096, 4096, D, D),
    "8 heads, a chunk": Spec(1, 8, 8, 1024, 4096, D, D),
}
CONSUMERS = (4, 3, 2)
COLUMNS = (
    "call",
    "batch",
    "q_heads",
    "kv_heads",
    "q_len",
    "kv_len",
    "is_causal",
    "torch-cudnn, ms",
    "triton-fa3, ms",
    "consumers",
    *(f"{each} consumers, ms" for each in CONSUMERS),
    *(f"{each} consumers, predicted" for each in CONSUMERS),
    *MACHINE,
)

Run = Callable[[], Any]


def main() -> None:
    print(narrow_heads(write_measured(__doc__, "narrow_heads.csv", COLUMNS, lines, CALLS)))


def lines(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the line of a call."""
    spec = CALLS[name]
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    runs: dict[str, Run] = {
        f"{name}, ms": functools.partial(find(name).attention, **call.arguments())
        for name in ("torch-cudnn", "triton-fa3")
    }
    runs |= {
        f"{each} consumers, ms": with_consumers(each, runs["triton-fa3, ms"]) for each in CONSUMERS
    }
    samples = timed(runs, device, ROUNDS, 0.1)
    sizes = {size: getattr(spec, size) for size in COLUMNS[1:7]}
    times = {part: statistics.median(sample.ms) for part, sample in samples.items()}
    yield {"call": name} | sizes | times | predicted(spec, device)


def predicted(spec: Spec, device: torch.device) -> dict[str, Any]:
    """Return the predicted time of each schedule, in ms, and the chosen schedule."""
    from attention_kernels.hopper import schedule as schedules
    from attention_kernels.hopper.head_groups import VisibleKeys
    from attention_kernels.hopper.persistent import multiprocessors

    right = 0 if spec.is_causal else None
    visible = VisibleKeys(spec.q_len, spec.kv_len, 0, None, right, queries=1, keys=1)
    heads, group = spec.batch * spec.q_heads, spec.q_heads // spec.kv_heads
    call = schedules.WholeCall(visible, heads, multiprocessors(device))
    times = schedules.times_of(group, call)
    line: dict[str, Any] = {
        f"{plan.consumers} consumers, predicted": time / 1000 for plan, time in times.items()
    }
    return line | {"consumers": min(times, key=times.__getitem__).consumers}


def with_consumers(count: int, run: Run) -> Run:
    """Return the same call with `count` consumers, planned once and then cached."""
    from attention_kernels.hopper import hopper_prefill, schedule

    schedules = schedule.NARROW
    only = tuple(each for each in schedules if each[0].consumers == count)
    usual = hopper_prefill._planned

    @functools.lru_cache
    def planned(*arguments: Any) -> Any:
        with mock.patch.object(schedule, "NARROW", only * len(schedules)):
            return usual.__wrapped__(*arguments)

    def again() -> Any:
        setattr(hopper_prefill, "_planned", planned)  # noqa: B010 (to mypy it is another function)
        try:
            return run()
        finally:
            setattr(hopper_prefill, "_planned", usual)  # noqa: B010

    return again


if __name__ == "__main__":
    main()
