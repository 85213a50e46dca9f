"""Measures the time that computing a call's difficulty takes, for `capture --sample hard`.

    python -m benchmarks.difficulty_overhead

On a CPU, times calls of the built-in models' shapes in processor time of a single thread. On a GPU,
times calls of the full-size models' shapes in wall time until the GPU is done. Attention and
difficulty take turns. Writes `benchmarks/results/difficulty_overhead.csv`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import results
from benchmarks.capture_overhead import COLUMNS, MACHINE, Figures
from capture.call.attention_call import AttentionCall
from capture.recording.difficulty import with_difficulty
from replay.timing.machine import describe

SHAPES = {  # batch, heads of query and key, lengths of query and key, head dimension
    "cpu": {
        "cogvideo, denoise": (2, 3, 3, 2464, 2464, 64),
        "flux, denoise": (1, 2, 2, 1088, 1088, 128),
        "llama, prefill": (1, 4, 2, 1024, 1024, 128),
        "llama, decode": (1, 4, 2, 1, 1031, 128),
    },
    "cuda": {
        "cogvideo, denoise": (2, 30, 30, 17776, 17776, 64),
        "flux, denoise": (1, 24, 24, 4608, 4608, 128),
        "llama, prefill": (1, 32, 32, 4096, 4096, 128),
        "llama, decode": (1, 32, 32, 1, 4097, 128),
    },
}
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "difficulty_overhead.csv")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    machine = describe(device)
    where = {f"machine.{name}": getattr(machine, name) for name in MACHINE}
    figures = Figures("calls of these shapes", "normal values", where)
    for name, shape in SHAPES[device.type].items():
        call = _call(shape, device, name.endswith("prefill"))
        attention, difficulty = _seconds(call)
        figures.add(f"{name}: difficulty", "ms", [1e3 * each for each in difficulty])
        ratios = [one / other for one, other in zip(difficulty, attention, strict=True)]
        figures.add(f"{name}: difficulty / attention", "×", ratios)
    results.write_lines(figures.lines, COLUMNS, arguments.out)


def _call(
    shape: tuple[int, int, int, int, int, int], device: torch.device, is_causal: bool
) -> AttentionCall:
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype)
        for heads, length in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    return AttentionCall(query, key, value, is_causal=is_causal, enable_gqa=q_heads != kv_heads)


def _seconds(call: AttentionCall) -> tuple[list[float], list[float]]:
    """Time the call's attention and its difficulty, in turn."""
    attention, difficulty = [], []
    for number in range(ROUNDS + 1):
        times = (
            _timed(lambda: scaled_dot_product_attention(**call.arguments()), call.device),
            _timed(lambda: with_difficulty(call), call.device),
        )
        if number:  # the first repetition warms up
            attention.append(times[0])
            difficulty.append(times[1])
    return attention, difficulty


def _timed(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.thread_time()
        function()
        return time.thread_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
