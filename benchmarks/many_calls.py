"""Measures the cost of distributing calls: processor time of the command's own process.

    python -m benchmarks.many_calls

Simulated workers return rows at once, one for every call and kernel; rows are written as by
`--json`. Writes `benchmarks/results/many_calls.csv`, a line for each combination of rows, kernels
and devices. Takes about two minutes, without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from replay.bench.settings import Settings
from replay.distribution.device_slots import Device
from replay.distribution.fleet import DeviceSlot, Fleet
from replay.kernels.registry import Kernel
from replay.rows.row import HERE, CallFacts, KernelId, Machine, Row, TimeSummary
from replay.rows.row_files import write_jsonl
from replay.timing.machine import describe
from replay.timing.statistics import summarize
from replay.workers.execution import Assignment
from replay.workloads.random_calls import Spec
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload, random_workload

ROWS = (100, 1000, 10000)
DEVICES = (1, 2, 8)
CASES = ((1, "one"), (10, "one"), (50, "one"), (10, "each its own"))
"""Pairs of the number of kernels on each call, and the forms of the calls."""
MACHINE = Machine("none")
COLUMNS = ("rows", "kernels", "forms", "devices", "cpu_seconds", "machine.device")


class Instant:
    """Simulated workers, which return rows immediately."""

    def __init__(self, times: TimeSummary) -> None:
        self._times = times

    def replay(self, schedule: Schedule, assigned: Assignment, *_: Any) -> Iterator[Row]:
        (call,) = schedule
        for kernel in assigned[HERE]:
            facts = CallFacts(call.name)
            yield Row(kernel.name, facts, "ok", time_ms=self._times, machine=MACHINE)

    def machines(self, device: torch.device) -> list[Machine]:
        return [MACHINE]

    def first_calls(self, *_: Any) -> dict[KernelId, float]:
        return {}

    def work_on(self, device: torch.device) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=max(ROWS), help="maximum rows (default 10000)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "many_calls.csv")
    arguments = parser.parse_args()
    device = describe(torch.device("cpu")).device
    lines = []
    counts = [rows for rows in ROWS if rows <= arguments.rows]
    for (kernels, forms), rows, devices in itertools.product(CASES, counts, DEVICES):
        numbers = range(rows // kernels)
        calls = [call(number, 0 if forms == "one" else number) for number in numbers]
        seconds = cpu_seconds(calls, kernels, devices)
        values = (rows, kernels, forms, devices, seconds, device)
        line = dict(zip(COLUMNS, values, strict=True))
        print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
        lines.append(line)
    results.write_lines(lines, COLUMNS, arguments.out)


def call(number: int, form: int) -> Workload:
    spec = replace(Spec(1, 2, 2, 64, 64, 32, 32), head_dim=32 + form)
    return random_workload(f"call-{number:06d}", "random", spec, number)


def cpu_seconds(calls: list[Workload], kernels: int, devices: int) -> float:
    """Return this process's processor seconds until all rows are written."""
    settings = Settings(torch.device("cpu"), "warm")
    named = [Kernel(f"kernel-{number}", torch.clone) for number in range(kernels)]
    times = summarize([1.0] * settings.rounds)
    with ThreadPoolExecutor(devices) as pool, tempfile.TemporaryFile("w") as file:
        slots = [
            DeviceSlot(Device(f"GPU {index}", "none"), Instant(times))  # type: ignore[arg-type]
            for index in range(devices)
        ]
        began = time.process_time()
        rows = Fleet(slots, pool).replay(
            Schedule(calls), {HERE: named}, settings, lambda workload, stage, device="": None
        )
        write_jsonl(rows, file)
        return time.process_time() - began


if __name__ == "__main__":
    main()
