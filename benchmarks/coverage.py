"""Measures how often a replay's verdicts about speed are right.

    python -m benchmarks.coverage                     on the GPU if there is one
    python -m benchmarks.coverage --device cpu --pairs 400
    python -m benchmarks.coverage --device cpu --pairs 400 --max-seconds 0.02

Every pair is a replay of one random call with three kernels: a kernel, the same kernel under a
second name, and the kernel with 3 % more work (a calibrated wait). The first two must tie, and the
third must be found slow. There are 30 rounds; verdicts of fewer rounds are computed from the first
rounds. With `--max-seconds` the replay itself decides when to stop, after 100
rounds at most. In `benchmarks/results/coverage.csv`, replaces this machine's lines whose rounds
ended in the same way.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.gpu import measured_on
from replay.bench.runner import replay_here
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel, find
from replay.rows.row import Row, Speedup
from replay.timing.defaults import SECONDS
from replay.timing.machine import describe
from replay.timing.rounds import measure
from replay.timing.statistics import paired_ratios, speedup_of
from replay.timing.timer import Cache
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload

BASELINE = "torch-flash"
ROUNDS = (6, 10, 30)
ROUNDS_UNTIL_STOPPED = 100
MORE_WORK = 0.03
"""Share of extra work, the minimum difference that counts; launching adds a little more."""
SPECS = {
    "cuda": Spec(1, 24, 24, 4096, 4096, 128, 128),
    "cpu": Spec(1, 4, 4, 256, 256, 64, 64, dtype=torch.float32),
}
CACHES: dict[str, Cache] = {"cuda": "cold", "cpu": "warm"}
MACHINE = ("machine.python", "machine.torch", "machine.cuda")
COLUMNS = (
    "device",
    "threads",
    "stop",
    "rounds",
    "pairs",
    "ties",
    "ties.share",
    "ties.low",
    "ties.high",
    "same",
    "found",
    "found.share",
    "found.low",
    "found.high",
    "more_time",
    "load",
    *MACHINE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--max-seconds", type=float, default=SECONDS, help="time limit per kernel")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "coverage.csv")
    arguments = parser.parse_args()
    is_stopped = arguments.max_seconds != SECONDS
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    machine = describe(device)
    where = {
        "device": machine.device,
        "threads": machine.threads,
        "stop": f"--max-seconds {arguments.max_seconds:g}" if is_stopped else "",
        **measured_on(device, MACHINE),
    }
    kernels = [find(BASELINE), replace(find(BASELINE), name="again"), slower(device)]
    settings = Settings(
        device,
        CACHES[device.type],
        rounds=ROUNDS_UNTIL_STOPPED if is_stopped else max(ROUNDS),
        max_seconds=arguments.max_seconds,
        baseline=BASELINE,
    )
    found: list[dict[str, list[float]]] = []
    load = []
    for pair in range(arguments.pairs):
        call = random_workload(f"pair-{pair}", "random", SPECS[device.type], pair)
        rows = list(replay_here([call], kernels, replace(settings, seed=pair)))
        for row in rows:
            if row.status != "ok":
                print(f"pair {pair} left out: {row.kernel}: {row.status}: {row.reason}", flush=True)
        if all(row.status == "ok" for row in rows):
            found.append(ratios(rows))
        load.append(os.getloadavg()[0])
        if found and ((pair + 1) % 20 == 0 or pair + 1 == arguments.pairs):
            lines = [
                summary(found, rounds) | where | {"load": f"{median(load):.1f}"}
                for rounds in ((ROUNDS_UNTIL_STOPPED,) if is_stopped else ROUNDS)
            ]
            print(f"{pair + 1} pairs, {time.monotonic() - began:.0f} s", flush=True)
            for line in lines:
                print(f"    {sentence(line)}", flush=True)
            write(lines, arguments.out)  # write now, in case the run is interrupted


def slower(device: torch.device) -> Kernel:
    """Return the baseline with `MORE_WORK`: a wait on a GPU, a busy loop on a CPU."""
    plain = find(BASELINE)
    arguments = SPECS[device.type].call(device).arguments()
    wait = torch.cuda._sleep if device.type == "cuda" else busy_loop
    much = 100_000
    functions: dict[str, Callable[[], object]] = {
        "plain": lambda: plain.attention(**arguments),
        "wait": lambda: wait(much),
    }
    with torch.no_grad():
        measured = measure(functions, device, cache=CACHES[device.type], rounds=200)
    # A CPU uses the minimum, which other processes hardly change.
    typical = median if device.type == "cuda" else min
    ms = {name: typical(samples.ms) for name, samples in measured.items()}
    amount = int(much * MORE_WORK * ms["plain"] / ms["wait"])
    print(f"{ms['plain']:.3f} ms a call, {amount} units of waiting before slower ones", flush=True)

    def attention(*inputs: Any, **options: Any) -> Tensor:
        wait(amount)
        return plain.attention(*inputs, **options)

    return replace(plain, name="slower", attention=attention)


def busy_loop(count: int) -> None:
    for _ in range(count):
        pass


def ratios(rows: list[Row]) -> dict[str, list[float]]:
    """Return the paired ratios by round, of `again` and `slower` against the baseline."""
    samples = {row.kernel: row.time_ms.samples for row in rows if row.time_ms is not None}
    return {name: paired_ratios(samples[BASELINE], samples[name]) for name in ("again", "slower")}


def summary(found: list[dict[str, list[float]]], rounds: int) -> dict[str, Any]:
    """Return a line of the result file: the verdicts after at most `rounds` rounds."""
    said: dict[str, list[Speedup]] = {
        name: [speedup_of(pair[name][:rounds]) for pair in found] for name in ("again", "slower")
    }
    pairs = len(found)
    verdicts = Counter(each.verdict for each in said["again"])
    ties = sum(not each.differs for each in said["again"])
    slow = sum(each.verdict == "slow" for each in said["slower"])
    taken = median(min(len(ratios), rounds) for pair in found for ratios in pair.values())
    line: dict[str, Any] = {"rounds": int(taken), "pairs": pairs, "same": verdicts["same"]}
    for name, count in (("ties", ties), ("found", slow)):
        low, high = wilson(count, pairs)
        line |= {name: count, f"{name}.share": count / pairs}
        line |= {f"{name}.low": low, f"{name}.high": high}
    line["more_time"] = 1 / median(ratio for pair in found for ratio in pair["slower"]) - 1
    return line


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `count` / `of` (Wilson 1927)."""
    z = 1.96
    middle = (count + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def sentence(line: dict[str, Any]) -> str:
    return (
        f"{line['rounds']} rounds: {line['ties']} of {line['pairs']} tie "
        f"({line['ties.share']:.1%}, {line['ties.low']:.1%}-{line['ties.high']:.1%}; "
        f"{line['same']} same), "
        f"{line['more_time']:.1%} more time found in {line['found']} ({line['found.share']:.1%})"
    )


def write(lines: list[dict[str, Any]], path: Path) -> None:
    """Replace the lines of this machine whose rounds ended in the same way."""
    replaced = [str(lines[0][name] or "") for name in ("device", "threads", "stop")]
    written = results.read(path) if path.exists() else []
    others = [
        each for each in written if [each[n] for n in ("device", "threads", "stop")] != replaced
    ]
    results.write_lines([*others, *lines], COLUMNS, path)


if __name__ == "__main__":
    main()
