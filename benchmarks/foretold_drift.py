"""Measures how well the error of random plans is foretold (`replay.sketches`), on other prompts.

    python -m benchmarks.foretold_drift [--plans 200] [--models flux,llama,minilm] [--device cuda]

Needs no GPU. Each model runs in float32 with random plans, which replace the attention of some
layers at some steps by emulated INT8, FP8 and block-sparse kernels; every second plan replaces half
of all places. The error of the final output (relative L2 of latents and embeddings, √KL of logits)
is the geometric mean over test prompts. A sketch foretells it from 39 runs on 13 other prompts.
Beside it are simpler predictors: sums and maxima of the errors of single attention outputs. These
foretell no amount, so their constant is fitted on the other half of the plans.

Besides the trained built-in models there are language models that ship with packages
(`benchmarks.packaged_models`), in a directory that `--packages` names. Models that are not there
are left out.

Writes a line for each plan to `benchmarks/results/foretold_drift.csv` as soon as the plan ran, and
goes on from the lines of an interrupted run. The printed figures are those of
`benchmarks.foretold_figures`.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import packaged_models, results
from benchmarks.foretold_figures import printed_table
from benchmarks.packaged_models import Subject
from benchmarks.plan_by_step import choice_of
from benchmarks.trained_runs import trained_runs
from replay.kernels.registry import find
from replay.patch.use_kernel import use_plan
from replay.plan.plan import Budget, Plan
from replay.plan.step_ranges import StepRange
from replay.sketches.final_output import FinalOutput, error_between, final_output
from replay.sketches.make_sketch import PROMPTS, make_sketch
from replay.sketches.sketch import ErrorSketch, Place
from replay.timing.machine import describe

KERNELS = [
    *(f"benchmarks/emulated_8_bit.py:{name}" for name in ("int8", "fp8")),
    *(f"benchmarks/emulated_sparse.py:sparse_{percent}" for percent in (70, 50, 30)),
]

SHARES = (0.1, 0.3, 0.6, 1.0)
"""Shares of the places that a plan replaces, unless it replaces half of them."""

COLUMNS = (
    *("model", "device", "plan", "replaced", "half", "measured", "prompts", "foretold", "upper"),
    *("root_sum_squares", "sum", "max", "last_layer", "sketch_runs", "seconds", "errors"),
)
WORK = Path("build/foretold_drift")

TOKENS = 384
"""Number of tokens of a text; the held-out text has 21 such parts."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a model's measurement."""

    load: Callable[[int, str, Path], Subject]
    """Function of the number of prompts, the device, and the directory of packages."""
    prompts: int = 8
    """Number of test prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for each model")
    parser.add_argument("--packages", type=Path, default=Path("build/packages"))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "foretold_drift.csv")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        setting = SETTINGS[name]
        try:
            subject = setting.load(PROMPTS + setting.prompts, arguments.device, arguments.packages)
        except FileNotFoundError as error:
            print(f"{name} is left out: {error}")
            continue
        measure(name, subject, setting.prompts, arguments)
    Console(width=110).print(printed_table(results.read(arguments.out)))


def measure(name: str, subject: Subject, tests: int, arguments: argparse.Namespace) -> None:
    """Write a line for each random plan that has none yet."""
    begin = time.monotonic()
    sketch = _sketch(name, subject, arguments.device)
    print(f"{name}: sketch of {sketch.runs} runs, {time.monotonic() - begin:.0f} s", flush=True)
    own = None
    done = {(line["model"], line["device"], line["plan"]) for line in _lines_of(arguments.out)}
    device = describe(torch.device(arguments.device)).device
    for number, chosen in enumerate(random_plans(sketch, arguments.plans)):
        if (name, device, str(number)) in done:
            continue
        if time.monotonic() - begin > arguments.seconds:
            return
        runs = [partial(_run, subject, run) for run in subject.runs[PROMPTS : PROMPTS + tests]]
        own = own or [run(None) for run in runs]
        start = time.monotonic()
        plan = plan_of(name, chosen)
        found = sketch.foretell(plan)
        errors = [error_between(mine, run(plan)) for mine, run in zip(own, runs, strict=True)]
        line = {
            "model": name,
            "device": device,
            "plan": number,
            "replaced": len(chosen),
            "half": number % 2 == 0,
            "measured": statistics.geometric_mean(errors),
            "prompts": tests,
            "foretold": found.error,
            "upper": found.upper,
            **simpler(sketch, chosen),
            "sketch_runs": sketch.runs,
            "seconds": time.monotonic() - start,
            "errors": [f"{error:.6g}" for error in errors],
        }
        _append(line, arguments.out)


def _sketch(name: str, subject: Subject, device: str) -> ErrorSketch:
    """Return the sketch of an earlier run, or make it."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"{name}-{device}.safetensors"
    if path.exists():
        return ErrorSketch.load(path)
    sketch = make_sketch(
        subject.roots,
        subject.runs[:PROMPTS],
        [find(kernel) for kernel in KERNELS],
        model=name,
        pipeline=subject.pipeline,
    )
    sketch.save(path)
    return sketch


def _run(subject: Subject, run: Callable[[], Any], plan: Plan | None) -> FinalOutput:
    with torch.no_grad():
        if plan is None:
            return final_output(run())
        with use_plan(plan, dict(subject.roots), any_device=True, trust_code=True):
            return final_output(run())


Chosen = dict[Place, str]
"""Kernel of each place that a plan replaces."""


def random_plans(sketch: ErrorSketch, number: int) -> list[Chosen]:
    """Draw plans over the places that every kernel supports: of denoising, if there are any."""
    places = [
        at for at, errors in zip(sketch.places, sketch.local, strict=True) if (errors > 0).all()
    ]
    places = [at for at in places if at.phase == "denoise"] or places
    draw = random.Random(0)
    plans = []
    for at in range(number):
        share = 0.5 if at % 2 == 0 else draw.choice(SHARES)
        count = max(1, round(share * len(places)))
        kernels = draw.sample(KERNELS, draw.choice((1, 2, 3, 5)))
        order = draw.sample(places, len(places))
        if draw.random() < 0.25:  # a window of steps, or of layers without steps
            first = draw.randrange(len(places))
            order = [*places[first:], *places[:first]]
            if places[0].phase == "denoise":
                steps, start = 1 + places[-1].step, places[first].step
                order = [
                    place
                    for later in range(steps)
                    for place in places
                    if place.step == (start + later) % steps
                ]
        plans.append({place: draw.choice(kernels) for place in order[:count]})
    return plans


def plan_of(model: str, chosen: Chosen) -> Plan:
    """Return a plan with these kernels, and the model's own attention everywhere else."""
    choices = [
        choice_of(
            place.module,
            place.phase,
            kernel,
            (place.kv_len, place.kv_len),
            StepRange(place.step, place.step) if place.phase == "denoise" else None,
        )
        for place, kernel in chosen.items()
    ]
    if any(place.phase == "denoise" for place in chosen):
        # Names the steps up to the last, so that none is reported as beyond the plan.
        place = max(chosen, key=lambda place: place.step)
        choices.append(
            choice_of(
                place.module,
                place.phase,
                "torch-default",
                (place.kv_len,) * 2,
                StepRange(9_000, 9_000),
            )
        )
    return Plan(model, "", Budget("cosine", -1.0), "torch-default", choices)


def simpler(sketch: ErrorSketch, chosen: Chosen) -> dict[str, float]:
    """Return predictors from the relative L2 errors of single attention outputs."""
    errors = {
        place: math.sqrt(sketch.local[sketch.places.index(place), sketch.kernels.index(kernel)])
        for place, kernel in chosen.items()
    }
    last = sketch.places[-1].module
    at_last = [error for place, error in errors.items() if place.module == last]
    return {
        "root_sum_squares": math.hypot(*errors.values()),
        "sum": math.fsum(errors.values()),
        "max": max(errors.values()),
        "last_layer": math.hypot(*at_last) or min(errors.values()),
    }


def _lines_of(path: Path) -> list[dict[str, str]]:
    return results.read(path) if path.exists() else []


def _append(line: Mapping[str, Any], path: Path) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({name: results.cell(value) for name, value in line.items()})


def _trained(name: str, steps: int | None, number: int, device: str, _packages: Path) -> Subject:
    arguments = None if name == "llama" else {"output_type": "latent"}
    runnable, runs = trained_runs(
        name, number, steps=steps, device=device, tokens=TOKENS, arguments=arguments
    )
    return Subject(runnable.roots, runs, runnable.pipeline)


SETTINGS = {
    "llama": Setting(partial(_trained, "llama", None)),
    "minilm": Setting(packaged_models.minilm),
    "antiberty": Setting(packaged_models.antiberty),
    "rxnmapper": Setting(packaged_models.rxnmapper),
    "flux": Setting(partial(_trained, "flux", None), prompts=4),
    "cogvideo": Setting(partial(_trained, "cogvideo", None), prompts=4),
}


if __name__ == "__main__":
    main()
