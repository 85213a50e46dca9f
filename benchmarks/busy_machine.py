"""Measures verdicts about speed between two processes, on a quiet or a busy machine.

    python -m benchmarks.busy_machine --calls 200                 one thread, four loops a processor
    python -m benchmarks.busy_machine --calls 200 --threads 2 --loops 0

Every call is replayed with PyTorch's kernel in one worker process, and in another with the same
kernel as a user's function, and with a function that calls it twice. No row may be an error, the
first two must not be told apart, and the third must be found to be 1.8 to 2.2 times as slow, or be
inconclusive. Workers are started anew after ten calls, because two processes differ from each
other. The result replaces the line of this machine and torch with as many threads and loops in
`benchmarks/results/busy_machine.csv`. With loops, ten calls take about two minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import results
from replay.api.replay_calls import replay
from replay.rows.row import Row
from replay.timing.cores import usable_cpus
from replay.timing.machine import describe
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload

BASELINE = "torch-default"
SPEC = Spec(1, 4, 4, 256, 256, 64, 64, dtype=torch.float32)
CALLS_OF_PROCESS = 10
CPU = torch.device("cpu")
FOUND = (1.8, 2.2)
KEYS = ("device", "threads", "loops", "machine.torch")
COLUMNS = (
    *KEYS,
    "calls",
    "errors",
    "again_not_told_apart",
    "twice_found",
    "twice_inconclusive",
    "twice_wrong",
    "median_ratio",
    "processor_share",
    "machine.python",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loops", type=int, default=4, help="busy loops for each processor")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    number = arguments.loops * usable_cpus()
    loops = [multiprocessing.Process(target=loop, daemon=True) for _ in range(number)]
    for each in loops:
        each.start()
    rows = list(replayed(arguments.calls))
    for each in loops:
        each.kill()
    machine = describe(CPU)
    line = {
        "device": machine.device,
        "threads": arguments.threads,
        "loops": len(loops),
        "machine.torch": machine.torch,
        "calls": arguments.calls,
        **summary(rows),
        "machine.python": machine.python,
    }
    print("\n".join(f"{name}: {value}" for name, value in line.items()))
    path = results.DIRECTORY / "busy_machine.csv"
    replaced = [str(line[name]) for name in KEYS]
    written = results.read(path) if path.exists() else []
    others = [each for each in written if [each[name] for name in KEYS] != replaced]
    results.write_lines([*others, line], COLUMNS, path)


def loop() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def replayed(calls: int) -> Iterable[Row]:
    """Yield the rows of three kernels on random calls."""
    file = Path(__file__).with_name("busy_kernels.py")
    kernels = [BASELINE, f"{file}:again", f"{file}:twice"]
    for start in range(0, calls, CALLS_OF_PROCESS):
        seeds = range(start, min(start + CALLS_OF_PROCESS, calls))
        some = [random_workload(f"call-{seed}", "random", SPEC, seed).load(CPU) for seed in seeds]
        yield from replay(some, kernels=kernels, device="cpu", baseline=BASELINE, progress=False)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Count the verdicts."""
    of = {
        name: [row.speedup for row in rows if row.kernel.endswith(f":{name}")]
        for name in ("again", "twice")
    }
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
        "again_not_told_apart": sum(each is None or not each.differs for each in of["again"]),
        **{f"twice_{word}": verdicts[word] for word in ("found", "inconclusive", "wrong")},
        "median_ratio": round(median(1 / each.ratio for each in of["twice"] if each), 3),
        "processor_share": round(median(shares), 3),
    }


if __name__ == "__main__":
    main()
