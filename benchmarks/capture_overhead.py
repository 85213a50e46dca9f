"""Measures what recording costs the running model.

    python -m benchmarks.capture_overhead                                 a small model on the CPU
    python -m benchmarks.capture_overhead --model cogvideo --size full --weights random --steps 4
    python -m benchmarks.capture_overhead --without-model             tiny calls on the CPU alone

Runs one model five ways, in shuffled rounds: plain; hooked, with one call kept in the first step
and none afterwards; with the hardest call kept, for which each call's difficulty is measured; with
`--max` calls kept, spread over the run; and with the same number kept in the first step. Every
ratio is taken within a round. The calls kept in the first step are compared with a plain write of
as many bytes to the same directory and, on a GPU, with a copy to pinned memory.

Also measures tiny calls on the CPU: the cost of a call that is not kept, and of each of 1,000 and
10,000 kept calls. Writes `benchmarks/results/capture_overhead.csv`, one line per figure.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from benchmarks import results
from capture import record
from replay.end_to_end.model_clock import Clock
from replay.timing.machine import describe
from replay.timing.statistics import summarize

GIB = 2**30
MACHINE = ("device", "torch", "cuda", "usable_cpus")
COLUMNS = (
    "model",
    "weights",
    "figure",
    "unit",
    "p10",
    "p50",
    "p90",
    "n",
    *(f"machine.{name}" for name in MACHINE),
)


@dataclass
class Run:
    """One run of the model: its seconds and kept calls."""

    steps: list[float]
    until_returned: float
    flush: float = 0.0
    """Seconds from the model's return until everything is on disk."""
    allocation: float = 0.0
    """Seconds of `until_returned` that allocating and pinning host memory took."""
    waited: float = 0.0
    """Seconds of `until_returned` that waiting for free host memory took."""
    written: int = 0
    """Bytes of all files, including files that were deleted later."""
    nbytes: int = 0
    kept: int = 0


@dataclass
class Figures:
    """Lines of the result file."""

    model: str
    weights: str
    machine: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, figure: str, unit: str, samples: Sequence[float]) -> None:
        summary = summarize(list(samples))
        print(f"{figure:58} {summary.p50:10.4g} {unit}", flush=True)
        self.lines.append(
            {
                "model": self.model,
                "weights": self.weights,
                "figure": figure,
                "unit": unit,
                **{name: getattr(summary, name) for name in ("p10", "p50", "p90", "n")},
                **self.machine,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="flux")
    parser.add_argument("--size", choices=("tiny", "full"))
    parser.add_argument("--weights", choices=("pretrained", "random"))
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of the model, at least 2 (default 4)"
    )
    parser.add_argument("--device")
    parser.add_argument("--max", type=int, default=10, help="calls to keep (default 10)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, help="directory to record to (default: temporary)"
    )
    parser.add_argument("--small-calls", default="1000,10000", metavar="N,N")
    parser.add_argument("--without-model", action="store_true", help="measure only tiny calls")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "capture_overhead.csv")
    arguments = parser.parse_args()
    runnable, device = None, torch.device("cpu")
    if not arguments.without_model:
        runnable = models.load(
            arguments.model,
            size=arguments.size,
            weights=arguments.weights,
            steps=arguments.steps,
            device=arguments.device,
        )
        device = torch.device(runnable.settings["device"])
    machine = describe(device)
    figures = Figures(
        runnable.name if runnable else "tiny calls",
        runnable.weights if runnable else "random",
        {f"machine.{name}": getattr(machine, name) for name in MACHINE},
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        if runnable is not None:
            of_model(runnable, device, Path(scratch), arguments.max, arguments.rounds, figures)
        not_kept(Path(scratch), figures)
        for count in map(int, arguments.small_calls.split(",")):
            small_calls(Path(scratch), count, figures)
    results.write_lines(figures.lines, COLUMNS, arguments.out)


def of_model(
    runnable: models.Runnable,
    device: torch.device,
    scratch: Path,
    wanted: int,
    rounds: int,
    figures: Figures,
) -> None:
    """Measure the model in the five ways that the module's docstring lists."""
    clock = Clock(runnable.roots, device)

    def plain() -> Run:
        with clock.running() as times:
            runnable.run()
        return Run(max(times.forwards.values(), key=len), times.run)

    def recorded(limit: int, sample: str) -> Callable[[], Run]:
        def run() -> Run:
            with tempfile.TemporaryDirectory(dir=scratch) as out:
                with record(runnable.roots, out, max=limit, sample=sample) as recording:
                    found = plain()
                    start = time.perf_counter()
                found.flush = time.perf_counter() - start
                found.nbytes, found.kept = recording.counts.nbytes, recording.kept
                found.allocation = recording.counts.allocation_seconds
                found.waited, found.written = (
                    recording.counts.waited_seconds,
                    recording.counts.written_bytes,
                )
                for problem in recording.problems:
                    print(f"problem: {problem}")
            return found

        return run

    arms = {
        "plain": plain,
        "hooked": recorded(1, "first"),
        "hard": recorded(1, "hard"),
        "spread": recorded(wanted, "spread"),
        "burst": recorded(wanted, "first"),
    }
    found: dict[str, list[Run]] = {name: [] for name in arms}
    limits: list[tuple[float, float]] = []
    for arm in arms.values():  # warm up: libraries, clocks, the directory
        arm()
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            found[name].append(arms[name]())
        limits.append(bare_seconds(found["burst"][-1], device, scratch))
    report(found, limits, device, figures)


def report(
    found: dict[str, list[Run]],
    limits: list[tuple[float, float]],
    device: torch.device,
    figures: Figures,
) -> None:
    """Add the figures of a model's rounds."""
    plain = found["plain"]

    def later(run: Run) -> float:
        return statistics.median(run.steps[1:])

    def against_plain(name: str, seconds: Callable[[Run], float]) -> list[float]:
        return [seconds(run) / seconds(own) for run, own in zip(found[name], plain, strict=True)]

    figures.add("step, plain", "ms", [1e3 * later(run) for run in plain])
    figures.add("step, hooked, nothing kept / plain", "×", against_plain("hooked", later))
    measured = against_plain("hard", later)
    figures.add("step, the difficulty of each call measured / plain", "×", measured)
    for name, where in (("spread", "over the run"), ("burst", "in the first step")):
        runs = found[name]
        kept = f"{runs[0].kept} kept {where}"
        figures.add(f"{kept}: size", "GiB", [run.nbytes / GIB for run in runs])
        ratios = against_plain(name, lambda run: run.until_returned)
        figures.add(f"{kept}: run until the model returned / plain", "×", ratios)
        apart = against_plain(name, lambda run: run.until_returned - run.allocation)
        figures.add(f"{kept}: the same without allocating host memory", "×", apart)
        figures.add(f"{kept}: allocating host memory", "ms", [1e3 * r.allocation for r in runs])
        figures.add(f"{kept}: waiting for host memory", "ms", [1e3 * r.waited for r in runs])
        figures.add(
            f"{kept}: bytes written / kept", "×", [run.written / run.nbytes for run in runs]
        )
        figures.add(f"{kept}: longest step", "ms", [1e3 * max(run.steps) for run in runs])
        figures.add(f"{kept}: flush after the model returned", "ms", [1e3 * r.flush for r in runs])
    burst = found["burst"]
    added = [run.until_returned - own.until_returned for run, own in zip(burst, plain, strict=True)]
    total = [more + run.flush for more, run in zip(added, burst, strict=True)]
    copied = "copy to pinned memory" if device.type == "cuda" else "copy in memory"
    sizes = [run.nbytes / GIB for run in burst]
    for what, seconds in (
        ("burst: from the first call until on disk", total),
        ("plain write of as many bytes", [write for write, _ in limits]),
        (f"{copied} of as many bytes", [copy for _, copy in limits]),
    ):
        figures.add(what, "GiB/s", [size / each for size, each in zip(sizes, seconds, strict=True)])
    shares = [max(limit) / each for limit, each in zip(limits, total, strict=True)]
    figures.add("burst: share of the slower of the two", "×", shares)


def bare_seconds(burst: Run, device: torch.device, scratch: Path) -> tuple[float, float]:
    """Time a plain write and a copy of the burst's bytes, in one part per kept call."""
    size = burst.nbytes // burst.kept
    on_gpu = device.type == "cuda"
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(burst.kept)]
    for part in pinned:
        part.copy_(source)  # touch the pages
    start = time.perf_counter()
    for part in pinned:
        part.copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize(device)
    copied = time.perf_counter() - start
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        start = time.perf_counter()
        for index, part in enumerate(pinned):
            with open(Path(out) / str(index), "wb", buffering=0) as file:
                rest = memoryview(part.numpy().data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        written = time.perf_counter() - start
    return written, copied


class Attention(nn.Module):
    """Calls attention on the same tiny tensors again and again."""

    def forward(self, states: Tensor, calls: int, attend: Callable[..., Tensor]) -> None:
        for _ in range(calls):
            attend(states, states, states)


STATES = (1, 2, 4, 8)


def not_kept(scratch: Path, figures: Figures, blocks: int = 40, calls: int = 1_000) -> None:
    """Time recording per tiny call on the CPU when no call is kept, without the call itself.

    Blocks of calls with and without recording take turns. The CPU time of a single thread is
    measured, which other processes hardly change.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    attention, states, own = Attention(), torch.randn(STATES), F.scaled_dot_product_attention
    for sample in ("first", "spread"):
        extra = []
        with (
            tempfile.TemporaryDirectory(dir=scratch) as out,
            torch.no_grad(),
            record(attention, out, max=1, sample=sample),
        ):
            hooked = F.scaled_dot_product_attention
            attention(states, calls, hooked)  # the first calls are kept, or replace each other
            for _ in range(blocks):
                seconds = {
                    attend: cpu_seconds(lambda attend=attend: attention(states, calls, attend))  # type: ignore[misc]
                    for attend in random.sample((own, hooked), 2)
                }
                extra.append((seconds[hooked] - seconds[own]) / calls)
        figures.add(f"a call that is not kept ({sample})", "µs", [1e6 * each for each in extra])
    torch.set_num_threads(threads)


def small_calls(scratch: Path, count: int, figures: Figures) -> None:
    """Time keeping all of `count` tiny calls on the CPU, until the calls are on disk."""
    attention, states = Attention(), torch.randn(STATES)
    with tempfile.TemporaryDirectory(dir=scratch) as out, torch.no_grad():
        start = time.perf_counter()
        with record(attention, out, max=count):
            attention(states, count, F.scaled_dot_product_attention)
        seconds = time.perf_counter() - start
    figures.add(f"{count:,} tiny calls, all kept: each", "ms", [1e3 * seconds / count])


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
