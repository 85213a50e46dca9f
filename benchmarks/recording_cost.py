"""Compares a recording with a plain run and a raw write of as many bytes.

    python -m benchmarks.recording_cost                   needs a GPU; two to four minutes
    python -m benchmarks.recording_cost --size tiny       tries the benchmark on a CPU

CogVideoX-2b with random weights runs plain and recorded in every round, and then as many bytes are
written to the same disk, file by file, each with an fsync. Every ratio is taken within a round.
Writes `benchmarks/results/recording_cost.csv`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import models
from benchmarks import results
from benchmarks.capture_overhead import COLUMNS, GIB, MACHINE, Figures
from benchmarks.gpu import gpu, measured_on
from capture import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max", type=int, default=10, help="calls to keep (default 10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="disk to write to (default: temporary)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "recording_cost.csv")
    arguments = parser.parse_args()
    device = gpu() if arguments.size == "full" else torch.device("cpu")
    runnable = models.load(
        "cogvideo",
        size=arguments.size,
        weights="random",
        steps=arguments.steps,
        device=str(device),
    )
    runnable.run()  # warm up
    # The first bytes in a machine's memory and on its disk are slower.
    each = 512 << 20 if device.type == "cuda" else 14 << 20
    raw_seconds(each, arguments.max, arguments.directory)
    rounds = []
    for index in range(arguments.rounds + 1):
        plain = seconds(runnable.run, device)
        found = recorded(runnable, device, arguments.max, arguments.directory)
        found["slower"] = found.pop("seconds") / plain
        raw = raw_seconds(found["nbytes"] // found["kept"], found["kept"], arguments.directory)
        rounds.append({"plain": plain, **found, "raw": raw})
        print(f"round {index}: {json.dumps(rounds[-1])}", flush=True)
    report(rounds, device, arguments.out)


def report(rounds: list[dict[str, Any]], device: torch.device, out: Path) -> None:
    """Print and write the figures.

    The first round has figures of its own, because a process's first recording allocates memory
    that later ones use again.
    """
    figures = Figures("CogVideoX-2b", "random", measured_on(device, MACHINE))
    slower = [each["slower"] for each in rounds]
    flush = [each["nbytes"] / GIB / each["flush_seconds"] for each in rounds]
    bare = [each["nbytes"] / GIB / each["raw"] for each in rounds]
    shares = [own / limit for own, limit in zip(flush, bare, strict=True)]
    figures.add("plain run", "s", [each["plain"] for each in rounds[1:]])
    kept = f"{rounds[0]['kept']} calls kept"
    figures.add(f"{kept}: size", "GiB", [each["nbytes"] / GIB for each in rounds[1:]])
    figures.add(f"{kept}: run until the model returned / plain", "×", slower[1:])
    figures.add(f"{kept}: the same, first recording", "×", slower[:1])
    figures.add(f"{kept}: flush after the model returned", "GiB/s", flush[1:])
    figures.add("raw write of as many bytes, with fsync", "GiB/s", bare[1:])
    figures.add(f"{kept}: flush / raw write", "×", shares[1:])
    figures.add(f"{kept}: flush / raw write, first recording", "×", shares[:1])
    results.write_lines(figures.lines, COLUMNS, out)


def recorded(
    runnable: models.Runnable, device: torch.device, most: int, directory: Path | None
) -> dict[str, Any]:
    """Record a run, and return its seconds, those of the flush after it, and what was stored."""
    with tempfile.TemporaryDirectory(dir=directory) as out:
        with record(runnable.roots, out, max=most) as recording:
            until_returned = seconds(runnable.run, device)
            start = time.perf_counter()
        flush = time.perf_counter() - start
    return {
        "seconds": until_returned,
        "flush_seconds": flush,
        "nbytes": recording.counts.nbytes,
        "kept": recording.kept,
        "problems": recording.problems,
    }


def seconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def raw_seconds(nbytes: int, files: int, directory: Path | None) -> float:
    """Write as many random bytes to each of several files, one after another, with an fsync."""
    values = memoryview(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().data)
    with tempfile.TemporaryDirectory(dir=directory) as out:
        start = time.perf_counter()
        for index in range(files):
            with open(Path(out) / str(index), "wb", buffering=0) as file:
                rest = values
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
