"""Compares times and rows of a replay on one and on two GPUs (needs a GPU).

    python -m benchmarks.many_gpus                    four replays, on two GPUs about four minutes
    python -m benchmarks.many_gpus --calls 4 --only warm --kernels torch-default,torch-flash

Records 16 calls of random values in sizes of FLUX.1, CogVideoX-2b and Llama 3, and replays these
calls with the command: on all GPUs with empty compile caches, on one and on all GPUs with the
filled caches, and on one GPU with empty caches. With `--only warm`, a replay of one call of each
size fills the caches. Writes `benchmarks/results/many_gpus.csv`, one line per figure, after each
replay; figures of other calls or kernels are kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results
from benchmarks.capture_overhead import COLUMNS, MACHINE, Figures
from benchmarks.gpu import gpu, measured_on
from capture import record
from replay.comparison.comparison import compare
from replay.comparison.row_matching import Run
from replay.comparison.speed_change import NO_SPREAD, Basis
from replay.rows.row_files import read_jsonl

KERNELS = "torch-default,torch-flash,torch-cudnn,triton-fa2,triton-fa3"
SIZES = {
    "flux": (1, 24, 24, 4608, 128, False),
    "cogvideo": (2, 30, 30, 17776, 64, False),
    "llama": (1, 32, 8, 8192, 128, True),
    "flux-long": (1, 24, 24, 8192, 128, False),
}
"""Batch, query heads, key/value heads, length, head dimension, and whether a mask is causal."""
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}


class Attention(nn.Module):
    """One call of random values; only the size matters."""

    def forward(self, name: str, device: torch.device) -> Tensor:
        batch, q_heads, kv_heads, length, dim, is_causal = SIZES[name]
        query, key, value = (
            torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16)
            for heads in (q_heads, kv_heads, kv_heads)
        )
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=q_heads != kv_heads
        )


class Replayed(NamedTuple):
    """One run of the command."""

    seconds: float
    measuring: float
    """Seconds from the moment that the first worker was ready."""
    rows: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=16, help="number of calls (default 16)")
    parser.add_argument(
        "--sizes", default="flux,cogvideo,llama,flux-long", help="sizes of the calls"
    )
    parser.add_argument("--kernels", default=KERNELS, help=f"kernels to time (default {KERNELS})")
    parser.add_argument("--rounds", type=int, default=30, help="rounds per call (default 30)")
    parser.add_argument(
        "--max-seconds", type=float, default=1.0, help="time limit per kernel (default 1)"
    )
    parser.add_argument("--only", choices=["warm", "cold"], help="state of the compile caches")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="approximate time limit in seconds (default 240)"
    )
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "many_gpus.csv")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = gpu()
    count = torch.cuda.device_count()
    figures = Figures(
        f"{arguments.calls} calls of {arguments.sizes}; {arguments.kernels}",
        "random",
        measured_on(device, MACHINE),
    )
    with tempfile.TemporaryDirectory() as scratch:
        sizes = arguments.sizes.split(",")
        dataset = recorded(Path(scratch, "recorded"), sizes, arguments.calls, device)
        each_once = recorded(Path(scratch, "each once"), sizes, len(sizes), device)
        found: dict[tuple[str, int], Replayed] = {}
        for state, gpus in runs(arguments.only, count):
            on_several = found.get((state, count))
            expected = 0.0 if on_several is None else count * on_several.seconds
            if time.monotonic() - began + expected > arguments.limit:
                print(f"no time left for {state} caches on {gpus} GPUs", flush=True)
                break
            place = Path(scratch) / ("other caches" if (state, gpus) == ("cold", 1) else "caches")
            named = ["--gpus", "all"] if gpus > 1 else ["--device", "cuda:0"]
            if state == "unmeasured":
                replay(each_once, named, place, state, arguments)
                continue
            replayed = replay(dataset, named, place, f"{state}-{gpus}", arguments)
            found[state, gpus] = replayed
            s = "s" * (gpus > 1)
            figures.add(f"{state} caches, {gpus} GPU{s}: the command", "s", [replayed.seconds])
            figures.add(f"{state} caches, {gpus} GPU{s}: measuring", "s", [replayed.measuring])
            if (state, 1) in found and (state, count) in found:
                add_ratios(figures, state, found[state, 1], found[state, count])
            written = results.read(arguments.out) if arguments.out.exists() else []
            others = [line for line in written if line["model"] != figures.lines[0]["model"]]
            results.write_lines([*others, *figures.lines], COLUMNS, arguments.out)
    print(f"{time.monotonic() - began:.0f} s in all")


def runs(only: str | None, gpus: int) -> Iterator[tuple[str, int]]:
    """Yield the state of the caches and the number of GPUs of each replay."""
    yield ("unmeasured" if only == "warm" else "cold"), gpus
    if only != "cold":
        yield "warm", 1
        yield "warm", gpus
    if only != "warm":
        yield "cold", 1


def recorded(directory: Path, sizes: list[str], calls: int, device: torch.device) -> Path:
    """Record calls of these sizes in turn."""
    attention = Attention()
    with torch.no_grad(), record(attention, directory, max=calls, weights="random"):
        for number in range(calls):
            attention(sizes[number % len(sizes)], device)
    torch.cuda.empty_cache()
    return directory


def replay(
    dataset: Path, where: list[str], caches: Path, name: str, arguments: argparse.Namespace
) -> Replayed:
    """Run the command with its own compile caches."""
    rows = caches.parent / f"{name}.jsonl"
    command = [sys.executable, "-m", "replay", "--dir", str(dataset), *where, "--verbose"]
    command += ["--kernels", arguments.kernels, "--rounds", str(arguments.rounds)]
    command += ["--max-seconds", str(arguments.max_seconds), "--json", str(rows)]
    variables = {variable: str(caches / folder) for variable, folder in CACHES.items()}
    began = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    ready = re.search(r"^ *([\d.]+) s  process \d+ is ready", done.stderr, re.MULTILINE)
    ended = re.search(r"^ *([\d.]+) s  \d+ calls took", done.stderr, re.MULTILINE)
    assert ready is not None
    assert ended is not None
    return Replayed(seconds, float(ended[1]) - float(ready[1]), rows)


def add_ratios(figures: Figures, state: str, one: Replayed, several: Replayed) -> None:
    """Add the speed-up of measuring, and the number of rows that agree."""
    figures.add(f"{state} caches: throughput, the command", "×", [one.seconds / several.seconds])
    figures.add(f"{state} caches: throughput, measuring", "×", [one.measuring / several.measuring])
    before, after = (Run(path.stem, read_jsonl(path).rows) for path in (one.rows, several.rows))
    bases: tuple[Basis, ...] = ("speed-up", "time")
    for basis in bases:
        pairs = compare(before, after, NO_SPREAD, basis).pairs
        verdicts = [pair.speed.verdict for pair in pairs if pair.speed is not None]
        share = 100 * verdicts.count("same") / len(verdicts)
        figures.add(f"{state} caches: rows whose {basis} is the same", "%", [share])
        changed = sum(verdict in ("fast", "slow") for verdict in verdicts)
        share = 100 * changed / len(verdicts)
        figures.add(f"{state} caches: rows whose {basis} changed", "%", [share])
    figures.add(f"{state} caches: rows in both", "", [float(len(pairs))])


if __name__ == "__main__":
    main()
