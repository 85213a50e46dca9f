"""Measures verdicts about speed on a machine that is busy with four loops for each processor.

    python -m benchmarks.busy_machine --calls 200                 one thread
    python -m benchmarks.busy_machine --calls 200 --threads 2

Every call is replayed with PyTorch's kernel, the same kernel under a second name, and a kernel that
calls SDPA twice. No row may be an error, the first two must not be told apart, and the third must
be found to be 1.8 to 2.2 times as slow, or be inconclusive. The result replaces the line of this
machine and number of threads in `benchmarks/results/busy_machine.csv`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from replay.bench.runner import replay_here
from replay.bench.settings import Settings
from replay.kernels.registry import find
from replay.rows.row import Row
from replay.timing.cores import usable_cpus
from replay.timing.defaults import CPU_SECONDS
from replay.timing.machine import describe
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload

BASELINE = "torch-flash"
LOOPS = 4
SPEC = Spec(1, 4, 4, 128, 128, 64, 64, dtype=torch.float32)
FOUND = (1.8, 2.2)
COLUMNS = (
    "device",
    "threads",
    "loops",
    "calls",
    "errors",
    "again_not_told_apart",
    "twice_found",
    "twice_inconclusive",
    "twice_wrong",
    "median_ratio",
    "processor_share",
    "machine.python",
    "machine.torch",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loops = [
        multiprocessing.Process(target=loop, daemon=True) for _ in range(LOOPS * usable_cpus())
    ]
    for each in loops:
        each.start()
    rows = replayed(arguments.calls)
    for each in loops:
        each.kill()
    machine = describe(torch.device("cpu"))
    line = {
        "device": machine.device,
        "threads": arguments.threads,
        "loops": len(loops),
        "calls": arguments.calls,
        **summary(rows),
        "machine.python": machine.python,
        "machine.torch": machine.torch,
    }
    print("\n".join(f"{name}: {value}" for name, value in line.items()))
    path = results.DIRECTORY / "busy_machine.csv"
    replaced = [str(line[name]) for name in ("device", "threads")]
    written = results.read(path) if path.exists() else []
    others = [each for each in written if [each["device"], each["threads"]] != replaced]
    results.write_lines([*others, line], COLUMNS, path)


def loop() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def replayed(calls: int) -> list[Row]:
    """Return the rows of three kernels on random calls."""
    plain = find(BASELINE)

    def attention(*inputs: Any, **options: Any) -> Tensor:
        plain.attention(*inputs, **options)
        return plain.attention(*inputs, **options)

    kernels = [
        plain,
        replace(plain, name="again"),
        replace(plain, name="twice", attention=attention),
    ]
    settings = Settings(
        device=torch.device("cpu"), cache="warm", max_seconds=CPU_SECONDS, baseline=BASELINE
    )
    rows: list[Row] = []
    for seed in range(calls):
        workload = random_workload(f"call-{seed}", "random", SPEC, seed)
        rows += replay_here([workload], kernels, replace(settings, seed=seed))
    return rows


def summary(rows: list[Row]) -> dict[str, Any]:
    """Count the verdicts."""
    of = {name: [row.speedup for row in rows if row.kernel == name] for name in ("again", "twice")}
    verdicts: Counter[str] = Counter()
    for speedup in of["twice"]:
        is_right = speedup is not None and FOUND[0] <= 1 / speedup.ratio <= FOUND[1]
        if speedup is None or not speedup.differs:
            verdicts["inconclusive"] += 1
        else:
            verdicts["found" if speedup.verdict == "slow" and is_right else "wrong"] += 1
    shares = [row.processor_share for row in rows if row.processor_share is not None]
    return {
        "errors": sum(row.status == "error" for row in rows),
        "again_not_told_apart": sum(each is not None and not each.differs for each in of["again"]),
        **{f"twice_{word}": verdicts[word] for word in ("found", "inconclusive", "wrong")},
        "median_ratio": round(median(1 / each.ratio for each in of["twice"] if each), 3),
        "processor_share": round(median(shares), 3),
    }


if __name__ == "__main__":
    main()
