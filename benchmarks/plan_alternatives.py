"""Compares plans with simpler choices of kernels that have the same total error (no GPU needed).

    python -m benchmarks.plan_alternatives [--out FILE]

Writes `benchmarks/results/plan_alternatives.csv`.

Both the times and the errors are measured:

- The time of each kernel, on an H100 (`hopper_kernels.csv`), at the sizes of four models.
- The error of each kernel at each layer and step of a trained small model of the same family, for
  several prompts, by emulation on a CPU (`attention_errors.csv`; Wan has CogVideoX's errors).

A cell is a layer at a step. The error of a choice is the sum of squared errors over the cells, and
each problem allows a share of the range between the most exact and the least exact kernels. Reduced
problems are a few layers and steps of the small model for one prompt, at most 9 cells, so that all
choices can be tried. A layer and step of the full model has the errors of the layer and step of the
small model at the same place between the first and the last, as the mean over the prompts. Llama
has one prefill and no steps; its first and last N are layers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu import MACHINE
from replay.plan.knapsack import ROUNDING, Option, solve

BASELINE = "torch-default"
EXACT = (BASELINE, "triton-fa3")
QUANTISED = ("triton-sage-fp8", "triton-fp8")
KERNELS = {"all": (*EXACT, *QUANTISED), "without triton-fa3": (BASELINE, *QUANTISED)}
BUDGETS = (0.05, 0.15, 0.35, 0.7)
REDUCED = 3
"""Number of layers and steps of a reduced problem; without steps, it has all layers."""

EMULATED = {"triton-sage-fp8": "sage_fp8", "triton-fp8": "fp8"}
"""Kernels in `attention_errors.csv`. All exact kernels round to 16 bits, as the baseline does."""

COLUMNS = (
    "model",
    "size",
    "kernels",
    "layers",
    "steps",
    "budget",
    "baseline_ms",
    "optimum_ms",
    "plan_ms",
    "gap",
    "single_ms",
    "ends_ms",
    "by_layer_ms",
    "exact_ms",
    "ceiling_ms",
    *MACHINE,
)


@dataclass(frozen=True)
class Model:
    """Model with the sizes of its calls, and the small trained model that has its errors."""

    name: str
    sizes: tuple[int, ...]
    """Sizes as in `results.SIZES`, without that of a value's head."""
    layers: int
    steps: int
    trained: str
    """Built-in model whose errors it has."""


MODELS = (
    Model("CogVideoX-2b", (2, 30, 30, 17776, 17776, 64), 30, 50, "cogvideo"),
    Model("FLUX.1", (1, 24, 24, 4608, 4608, 128), 57, 28, "flux"),
    Model("Wan 2.1 14B, 5 of 40 heads", (1, 5, 5, 75600, 75600, 128), 40, 50, "cogvideo"),
    Model("Llama 8K prefill", (1, 32, 8, 8192, 8192, 128), 32, 1, "llama"),
)

Problem = dict[tuple[int, int], list[Option]]
"""Options of each layer at each step; the options of all cells have the same kernels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "plan_alternatives.csv")
    arguments = parser.parse_args()
    lines = [line for model in MODELS for line in compared(model)]
    results.write_lines(lines, COLUMNS, arguments.out)


def compared(model: Model) -> Iterator[dict[str, Any]]:
    """Yield a line for each set of kernels, size and budget."""
    ms, machine = times(model)
    measured = errors(model.trained)
    for (name, kernels), size in itertools.product(KERNELS.items(), ("reduced", "full")):
        for number, share in enumerate(BUDGETS):
            if size == "reduced":
                cells = _reduced(measured, random.Random(f"{model.name} {number}"))
            else:
                cells = _full(measured, model)
            problem = {
                place: [
                    Option(kernel, ms[kernel], energies[EMULATED.get(kernel, BASELINE)])
                    for kernel in kernels
                ]
                for place, energies in cells.items()
            }
            yield {
                "model": model.name,
                "size": size,
                "kernels": name,
                "layers": len({layer for layer, _ in cells}),
                "steps": len({step for _, step in cells}),
                "budget": share,
                **choices(problem, share, is_small=size == "reduced"),
                **machine,
            }


Cells = dict[tuple[int, int], dict[str, float]]
"""Error of each kernel at each layer and step."""


def errors(trained: str) -> list[Cells]:
    """Return the measured errors of a built-in model, for each prompt."""
    found: dict[str, Cells] = {}
    for row in results.read(results.DIRECTORY / "attention_errors.csv"):
        if row["model"] == trained:
            place = int(row["layer"]), int(row["step"])
            cell = found.setdefault(row["prompt"], {}).setdefault(place, {})
            cell[row["kernel"]] = float(row["error_energy"])
    return list(found.values())


def _reduced(measured: Sequence[Cells], draw: random.Random) -> Cells:
    """Draw a prompt, layers and steps, which are numbered from 0."""
    cells = draw.choice(measured)
    layers, steps = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    if len(steps) > 1:
        layers, steps = (sorted(draw.sample(each, REDUCED)) for each in (layers, steps))
    return {
        (at, when): cells[layer, step]
        for (at, layer), (when, step) in itertools.product(enumerate(layers), enumerate(steps))
    }


def _full(measured: Sequence[Cells], model: Model) -> Cells:
    """Return the errors of a full model's layers and steps, as the mean over the prompts."""
    layers, steps = (1 + max(place[axis] for place in measured[0]) for axis in (0, 1))
    cells = {}
    for layer, step in itertools.product(range(model.layers), range(model.steps)):
        place = layer * layers // model.layers, step * steps // model.steps
        cells[layer, step] = {
            kernel: statistics.fmean(each[place][kernel] for each in measured)
            for kernel in measured[0][place]
        }
    return cells


def times(model: Model) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median time of each kernel in milliseconds, and the machine."""
    rows = [
        row
        for row in results.read(results.DIRECTORY / "hopper_kernels.csv")
        if tuple(int(row[f"call.shape.{size}"]) for size in results.SIZES[:6]) == model.sizes
        and row["status"] == "ok"
    ]
    machine = {name: rows[0][name] for name in COLUMNS if name.startswith("machine.")}
    return {row["kernel"]: float(row["time_ms.p50"]) for row in rows}, machine


def choices(problem: Problem, share: float, *, is_small: bool) -> dict[str, float]:
    """Return the time of the plan and of its alternatives, in milliseconds, within one error.

    Args:
        share: place of the error between the least and the greatest error of all choices.
        is_small: whether all choices can be tried.
    """
    cells = list(problem.values())
    least, greatest = (
        math.fsum(extreme(option.energy for option in cell) for cell in cells)
        for extreme in (min, max)
    )
    limit = least + share * (greatest - least)
    kernels = range(len(cells[0]))
    fastest_exact = min(
        (kernel for kernel in kernels if cells[0][kernel].name in EXACT),
        key=lambda kernel: cells[0][kernel].ms,
    )

    def best(chosen: Iterable[Callable[[int, int], int]]) -> float:
        """Return the least time of choices that are functions of layer and step."""
        totals = []
        for choice in chosen:
            options = [cell[choice(*place)] for place, cell in problem.items()]
            if math.fsum(option.energy for option in options) <= limit * (1 + ROUNDING):
                totals.append(math.fsum(option.ms for option in options))
        return min(totals)

    plan = solve(cells, limit)
    return {
        "baseline_ms": math.fsum(cell[0].ms for cell in cells),
        **({"optimum_ms": optimum(cells, limit)} if is_small else {}),
        "plan_ms": plan.objective,
        "gap": plan.gap,
        "single_ms": best((lambda *place, k=kernel: k) for kernel in kernels),
        "ends_ms": best(_ends(problem, kernels, fastest_exact)),
        "by_layer_ms": _by_layer(problem, limit, fastest_exact),
        "exact_ms": math.fsum(cell[fastest_exact].ms for cell in cells),
        "ceiling_ms": math.fsum(min(option.ms for option in cell) for cell in cells),
    }


def _ends(
    problem: Problem, kernels: Iterable[int], exact: int
) -> Iterator[Callable[[int, int], int]]:
    """Yield choices with an exact kernel at the first and the last steps, for all numbers of both.

    Without steps, the first and the last layers have the exact kernel.
    """
    layers, steps = (1 + max(place[axis] for place in problem) for axis in (0, 1))
    axis, length = (1, steps) if steps > 1 else (0, layers)
    for first in range(length + 1):
        for end, kernel in itertools.product(range(first, length + 1), kernels):
            yield lambda *place, f=first, e=end, k=kernel: k if f <= place[axis] < e else exact


def _by_layer(problem: Problem, limit: float, exact: int) -> float:
    """Return the time of a greedy choice by layer.

    All layers begin with the fastest exact kernel. The change of a layer's kernel that saves most
    time for each unit of error comes next, as long as one fits.
    """
    layers: dict[int, list[list[Option]]] = {}
    for (layer, _), cell in problem.items():
        layers.setdefault(layer, []).append(cell)
    totals = {
        layer: [
            (math.fsum(one.ms for one in options), math.fsum(one.energy for one in options))
            for options in zip(*cells, strict=True)
        ]
        for layer, cells in layers.items()
    }
    chosen = dict.fromkeys(layers, exact)
    while True:
        spent = math.fsum(totals[layer][kernel][1] for layer, kernel in chosen.items())
        steps = []
        for layer, kernel in chosen.items():
            old_ms, old_energy = totals[layer][kernel]
            for other, (ms, energy) in enumerate(totals[layer]):
                more = energy - old_energy
                if ms < old_ms and spent + more <= limit * (1 + ROUNDING):
                    rate = (old_ms - ms) / more if more > 0 else math.inf
                    steps.append((rate, layer, other))
        if not steps:
            return math.fsum(totals[layer][kernel][0] for layer, kernel in chosen.items())
        _, layer, other = max(steps)
        chosen[layer] = other


def optimum(cells: Sequence[Sequence[Option]], limit: float) -> float:
    """Return the least time of all choices within an error, by trying every choice."""
    ms = energy = torch.zeros(1, dtype=torch.float64)
    for cell in cells:
        times, energies = (
            torch.tensor([getattr(option, name) for option in cell], dtype=torch.float64)
            for name in ("ms", "energy")
        )
        ms = (ms[:, None] + times).flatten()
        energy = (energy[:, None] + energies).flatten()
    return float(ms[energy <= limit * (1 + ROUNDING)].min())


if __name__ == "__main__":
    main()
