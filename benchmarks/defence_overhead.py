"""Measures the cost of judging timed calls in a replay.

    python -m benchmarks.defence_overhead --device cuda             three random calls, on a GPU
    python -m benchmarks.defence_overhead --dir captured_inputs     recorded calls

Replays the same calls in three ways that take turns: like `replay`; with a worker that judges
outputs but not timed calls (`benchmarks.undefended`); and with that worker and a judge process, to
measure the cost of the second process. Each repetition starts new processes, and reports the wall
and processor time of all of them. Replaces this machine's lines of
`benchmarks/results/defence_overhead.csv`.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks import results
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel, find
from replay.rows.row import Row
from replay.timing.defaults import CPU_SECONDS, SECONDS
from replay.timing.machine import describe
from replay.workers.environments import Environment
from replay.workers.judge_process import CallEvidence, JudgeProcess
from replay.workers.process import Process, judge_process
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import from_directory
from replay.workloads.workload import Workload, random_workloads

ARMS = ("as it is", "without", "without, and a judge")
SPECS = {
    "cpu": [
        Spec(1, 8, 8, 512, 512, 64, 64, dtype=torch.float32),
        Spec(1, 8, 2, 1, 2048, 64, 64, dtype=torch.float32),
        Spec(2, 4, 4, 256, 256, 32, 32, dtype=torch.float32),
    ],
    "cuda": [
        Spec(1, 24, 24, 4096, 4096, 128, 128),
        Spec(1, 32, 8, 1, 8192, 128, 128),
        Spec(2, 16, 16, 1024, 1024, 64, 64),
    ],
}
KERNELS = {
    "cpu": "torch-default,torch-flash,torch-math",
    "cuda": "torch-default,torch-flash,torch-efficient,torch-cudnn,triton-fa2",
}
TIMEOUT = 300.0
COLUMNS = (
    "device",
    "threads",
    "calls",
    "rows",
    "repetitions",
    "arm",
    "wall_s",
    "cpu_s",
    "wall",
    "cpu",
    "load",
    "machine.python",
    "machine.torch",
    "machine.cuda",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dir", type=Path, help="recording (default: three random calls)")
    parser.add_argument("--kernels", help="kernels (default: kernels without extra packages)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "defence_overhead.csv")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.dir is None:
        calls = random_workloads("random", SPECS[device.type], seed=0)
    else:
        calls, _ = from_directory(arguments.dir)
    root = Path(__file__).parent.parent  # the worker lies outside the package
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    settings = Settings(
        device,
        "cold" if device.type == "cuda" else "warm",
        max_seconds=SECONDS if device.type == "cuda" else CPU_SECONDS,
    )
    names = arguments.kernels or KERNELS[device.type]
    kernels = [find(name) for name in names.split(",")]
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    load, timed = [], {}
    # This replay fills the caches of compilers.
    replay_once(ARMS[0], calls, kernels, replace(settings, rounds=1))
    for repetition in range(arguments.repetitions):
        for place in range(len(ARMS)):
            arm = ARMS[(repetition + place) % len(ARMS)]
            load.append(os.getloadavg()[0])
            wall, cpu, rows = replay_once(arm, calls, kernels, settings)
            taken[arm].append((wall, cpu))
            timed[arm] = sum(row.time_ms is not None for row in rows)
            said = f"{wall:.1f} s, {cpu:.1f} s of CPU, {timed[arm]} rows with times"
            print(f"{arm}: {said}", flush=True)
    machine = describe(device)
    lines = []
    for arm in ARMS:
        walls, cpus = zip(*taken[arm], strict=True)
        plain_walls, plain_cpus = zip(*taken["without"], strict=True)
        wall, cpu = paired(walls, plain_walls), paired(cpus, plain_cpus)
        lines.append(
            {
                "device": machine.device,
                "threads": machine.threads,
                "calls": len(calls),
                "rows": timed[arm],
                "repetitions": arguments.repetitions,
                "arm": arm,
                "wall_s": median(walls),
                "cpu_s": median(cpus),
                "wall": wall - 1,
                "cpu": cpu - 1,
                "load": f"{median(load):.1f}",
                "machine.python": machine.python,
                "machine.torch": machine.torch,
                "machine.cuda": machine.cuda,
            }
        )
        print(f"{arm}: wall {wall - 1:+.1%}, CPU {cpu - 1:+.1%}")
    write(lines, arguments.out)


def paired(seconds: tuple[float, ...], of_plain: tuple[float, ...]) -> float:
    """Return the median of the ratios within each repetition."""
    return median(one / other for one, other in zip(seconds, of_plain, strict=True))


def replay_once(
    arm: str, calls: list[Workload], kernels: list[Kernel], settings: Settings
) -> tuple[float, float, list[Row]]:
    """Return wall and processor seconds of a replay, including start and end of its processes."""
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    worker, judges = Process(sys.executable, TIMEOUT), judge_process(TIMEOUT)
    if arm != "as it is":
        worker = Process(sys.executable, TIMEOUT, "benchmarks.undefended")
    judge = None if arm == "without" else JudgeProcess(judges)
    environment = Environment("this", sys.executable, TIMEOUT, judge=judge, worker=worker)
    believing = mock.patch.object(CallEvidence, "why_rejected", return_value="")
    try:
        if arm == "without, and a judge":  # the judge sees no timed samples
            believing.start()
        worker.prepare(do="touch", device=str(settings.device))  # as the command does
        if judge is not None:
            judges.prepare(do="touch", device=str(settings.device))
        rows: list[Row] = []
        for call in calls:
            rows += environment.replay(call, kernels, settings, lambda stage: None)
    finally:
        mock.patch.stopall()
        if judge is not None:
            judge.end()  # processes end in parallel, like those of the command
        environment.close()
        if judge is not None:
            judge.close()
    return time.perf_counter() - began, _cpu_seconds() - began_cpu, rows


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def write(lines: list[dict[str, object]], path: Path) -> None:
    """Replace the lines of this machine and this number of calls."""
    key = ("device", "threads", "calls")
    of_this = tuple(results.cell(lines[0][name]) for name in key)
    written = results.read(path) if path.exists() else []
    others = [each for each in written if tuple(each[name] for name in key) != of_this]
    results.write_lines([*others, *lines], COLUMNS, path)


if __name__ == "__main__":
    main()
