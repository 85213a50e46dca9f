"""Measures what recording costs a model whose calls are not kept, and tiny calls that are.

    python -m benchmarks.capture_overhead                                 a small model on the CPU
    python -m benchmarks.capture_overhead --model cogvideo --size full --weights random --steps 4
    python -m benchmarks.capture_overhead --without-model             tiny calls on the CPU alone

Runs one model three ways, in shuffled rounds: plain; hooked, with one call kept in the first step
and none afterwards; and with the hardest call kept, for which each call's difficulty is measured.
Every ratio is taken within a round. `benchmarks.recording_cost` measures the calls that are kept.

Also measures tiny calls on the CPU: the cost of a call that is not kept, and of each of 1,000 and
10,000 kept calls. Writes `benchmarks/results/capture_overhead.csv`, one line per figure.
"""

from __future__ import annotations

import argparse
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
from benchmarks.gpu import measured_on
from capture import record
from replay.end_to_end.model_clock import Clock
from replay.timing.statistics import summarize

GIB = 2**30
MACHINE = ("machine.device", "machine.torch", "machine.cuda", "machine.usable_cpus")
COLUMNS = (
    "model",
    "weights",
    "figure",
    "unit",
    "p10",
    "p50",
    "p90",
    "n",
    *MACHINE,
)


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, help="directory to record to (default: temporary)"
    )
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
    figures = Figures(
        runnable.name if runnable else "tiny calls",
        runnable.weights if runnable else "random",
        measured_on(device, MACHINE),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        if runnable is not None:
            of_model(runnable, device, Path(scratch), arguments.rounds, figures)
        not_kept(Path(scratch), figures)
        for count in (1_000, 10_000):
            small_calls(Path(scratch), count, figures)
    results.write_lines(figures.lines, COLUMNS, arguments.out)


def of_model(
    runnable: models.Runnable, device: torch.device, scratch: Path, rounds: int, figures: Figures
) -> None:
    """Measure the model in the three ways that the module's docstring lists."""
    clock = Clock(runnable.roots, device)

    def plain() -> float:
        """Return the median seconds of the steps after the first."""
        with clock.running() as times:
            runnable.run()
        return statistics.median(max(times.forwards.values(), key=len)[1:])

    def recorded(sample: str) -> float:
        with (
            tempfile.TemporaryDirectory(dir=scratch) as out,
            record(runnable.roots, out, max=1, sample=sample),
        ):
            return plain()

    arms = {
        "plain": plain,
        "hooked": lambda: recorded("first"),
        "hard": lambda: recorded("hard"),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():  # warm up: libraries, clocks, the directory
        arm()
    for _ in range(rounds):
        for name in random.sample(list(arms), len(arms)):
            found[name].append(arms[name]())

    def against_plain(name: str) -> list[float]:
        return [seconds / own for seconds, own in zip(found[name], found["plain"], strict=True)]

    figures.add("step, plain", "ms", [1e3 * seconds for seconds in found["plain"]])
    figures.add("step, hooked, nothing kept / plain", "×", against_plain("hooked"))
    figures.add("step, the difficulty of each call measured / plain", "×", against_plain("hard"))


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
