"""Measures the share of a replay's time that confirms and judges what workers say.

    python -m benchmarks.defence_overhead --device cuda             three random calls, on a GPU
    python -m benchmarks.defence_overhead --dir captured_inputs     recorded calls

Each repetition starts new processes. The parent process clocks all blocks of calls, and all other
answers of the judge while a worker waits. Replaces this machine's lines of
`benchmarks/results/defence_overhead.csv`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks import results
from benchmarks.gpu import measured_on
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel, find
from replay.timing.defaults import CPU_SECONDS, SECONDS
from replay.timing.machine import describe
from replay.workers.execution import execution
from replay.workers.judge_process import CallEvidence
from replay.workers.process import first_processes
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import from_directory
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload, random_workloads

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
MACHINE = ("machine.python", "machine.torch", "machine.cuda")
COLUMNS = (
    "device",
    "threads",
    "calls",
    "rows",
    "repetitions",
    "wall_s",
    "blocks_s",
    "judge_s",
    "load",
    *MACHINE,
)


class Clock:
    """Seconds of blocks, and of the judge's other answers, seen from the parent process."""

    def __init__(self) -> None:
        self.blocks_s = self.judge_s = self._began = 0.0
        self._answer = CallEvidence.answer

    def answer(self, evidence: CallEvidence, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a worker's question, and clock it."""
        began, step = time.perf_counter(), question["do"]
        if step == "begin block":
            self._began = began
        found = self._answer(evidence, question)
        if step == "end block":
            self.blocks_s += time.perf_counter() - self._began
        elif step != "begin block":
            self.judge_s += time.perf_counter() - began
        return found


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
    settings = Settings(
        device,
        "cold" if device.type == "cuda" else "warm",
        max_seconds=SECONDS if device.type == "cuda" else CPU_SECONDS,
    )
    names = arguments.kernels or KERNELS[device.type]
    kernels = [find(name) for name in names.split(",")]
    taken, rows, load = [], 0, []
    for repetition in range(arguments.repetitions + 1):
        load.append(os.getloadavg()[0])
        rows, *seconds = replay_once(calls, kernels, settings)
        print(
            f"{seconds[0]:.1f} s, blocks {seconds[1]:.1f} s, judge {seconds[2]:.1f} s, {rows} rows"
        )
        if repetition:  # the first replay fills the caches of compilers
            taken.append(seconds)
    machine = describe(device)
    wall_s, blocks_s, judge_s = (median(each) for each in zip(*taken, strict=True))
    line = {
        "device": machine.device,
        "threads": machine.threads,
        "calls": len(calls),
        "rows": rows,
        "repetitions": arguments.repetitions,
        "wall_s": wall_s,
        "blocks_s": blocks_s,
        "judge_s": judge_s,
        "load": f"{median(load):.1f}",
        **measured_on(device, MACHINE),
    }
    write(line, arguments.out)


def replay_once(
    calls: list[Workload], kernels: list[Kernel], settings: Settings
) -> tuple[int, float, float, float]:
    """Return the number of timed rows, and the seconds of a replay, its blocks and its judge."""
    began, clock, rows = time.perf_counter(), Clock(), 0

    def answer(evidence: CallEvidence, question: dict[str, Any]) -> dict[str, Any]:
        return clock.answer(evidence, question)

    with mock.patch.object(CallEvidence, "answer", answer), first_processes(TIMEOUT) as first:
        first.prepare(str(settings.device))
        with execution(first, {}, TIMEOUT) as where:
            for row in where.replay(Schedule(calls), {"this": kernels}, settings, lambda *_: None):
                rows += row.time_ms is not None
    return rows, time.perf_counter() - began, clock.blocks_s, clock.judge_s


def write(line: dict[str, object], path: Path) -> None:
    """Replace the line of this machine and this number of calls."""
    key = ("device", "threads", "calls")
    of_this = tuple(results.cell(line[name]) for name in key)
    written = results.read(path) if path.exists() else []
    others = [each for each in written if tuple(each[name] for name in key) != of_this]
    results.write_lines([*others, line], COLUMNS, path)


if __name__ == "__main__":
    main()
