"""Tunes the trained built-in models within random budgets, and judges the plans on other prompts.

    python -m benchmarks.tuning_budgets [--tunings 50] [--models cogvideo,flux,llama] [--out FILE]
    python -m benchmarks.tuning_budgets --sketch [--tunings 10]

Needs no GPU. Writes `benchmarks/results/tuning_budgets.csv`, one line a tuning.

Each model is recorded once, and the emulated kernels of `emulated_8_bit.py` are compared once on
the recorded calls. As emulated kernels are slow, the times in the rows are replaced: each kernel
has the time that the real one has at the size of the full model, on an H100
(`benchmarks/results/hopper_kernels.csv`).

Each tuning then chooses the fastest plan within its budget, as `tune` does: some prompts are for
the search and others for acceptance. At the end, the plan is judged on a third set of prompts. The
limit of the budget is drawn between the quality of the fastest plan and that of the most careful
one, on a logarithmic scale of the loss. The outputs of a plan are kept for the model's other
tunings.

With `--sketch`, each budget has two tunings, and the second takes its plans from a sketch
(`replay.sketches`). Flux is then judged on the run that it is tuned on, without acceptance. The
lines are written to `benchmarks/results/sketched_tuning.csv`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import results
from benchmarks.plan_alternatives import BASELINE, MODELS, times
from benchmarks.trained_runs import TEXT_TOKENS, Run, trained_runs
from replay.api.tuning_planner import planner_of
from replay.api.tuning_recording import recorded
from replay.api.tuning_stages import LEAST_PROMPTS, Stages
from replay.distribution.time_limit import TimeLimit
from replay.kernels.registry import find
from replay.plan.plan import Plan
from replay.rows.row import Row
from replay.sketches.make_sketch import make_sketch
from replay.timing.statistics import summarize
from replay.tune.directory import TuningDirectory
from replay.tune.judge import Judge
from replay.tune.judged_runs import JudgedRuns
from replay.tune.quality import METRICS, Quality, QualityBudget
from replay.tune.search import CLOSE, Key, Planner, key_of

PRICED = {
    "torch-default": BASELINE,
    "benchmarks/emulated_8_bit.py:sage_fp8": "triton-sage-fp8",
    "benchmarks/emulated_8_bit.py:fp8": "triton-fp8",
}
"""Kernels to choose from, and the kernel whose time on the H100 each of them has."""

PARTS = ("search", "acceptance", "third")
"""Parts of the prompts."""

SAMPLES = 6
"""Number of equal samples that stand for a replaced time."""

LEAST_LOSS = 0.01
"""Smallest loss of quality that is drawn, as a share of the fastest plan's."""

MACHINE = ("machine.device", "machine.python", "machine.torch")
COLUMNS = (
    "model",
    "sketch",
    "metric",
    "limit",
    *PARTS,
    "holds",
    "saved",
    "judged",
    "seconds",
    *MACHINE,
)


class Setting(NamedTuple):
    """Metrics and runs of a model's tunings."""

    metrics: tuple[str, ...]
    prompts: int
    """Number of prompts in each part."""
    steps: int | None = None


SETTINGS = {
    "cogvideo": Setting(("psnr", "ssim", "relative_l1"), prompts=3, steps=4),
    "flux": Setting(("psnr", "ssim", "relative_l1"), prompts=4, steps=8),
    "llama": Setting(("kl", "top1", "perplexity"), prompts=4),
}

SKETCHED = {
    "flux": Setting(("relative_l1",), prompts=1, steps=4),
    "llama": Setting(("kl",), prompts=LEAST_PROMPTS),
}
"""Settings of tunings with a sketch."""

TOKENS = {False: TEXT_TOKENS, True: 256}
"""Number of tokens of a text without and with a sketch, which needs more texts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tunings", type=int, default=50)
    parser.add_argument("--models", help="names of models (default: all)")
    parser.add_argument("--sketch", action="store_true", help="tune with a sketch too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    is_sketched = arguments.sketch
    names = (arguments.models or ",".join(SKETCHED if is_sketched else SETTINGS)).split(",")
    numbers = [len(range(at, arguments.tunings, len(names))) for at in range(len(names))]
    # Each model has a process with one thread, so that two cores tune two models at a time.
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        found = pool.map(tuned, names, numbers, itertools.repeat(is_sketched))
        lines = [*itertools.chain.from_iterable(found)]
    file = "sketched_tuning.csv" if is_sketched else "tuning_budgets.csv"
    results.write_lines(lines, COLUMNS, arguments.out or results.DIRECTORY / file)
    held = sum(line["holds"] for line in lines)
    print(f"{held} of {len(lines)} plans are within their budget on the third prompts")


def tuned(name: str, number: int, is_sketched: bool) -> list[dict[str, Any]]:
    """Tune a model within a number of random budgets, and return a line for each tuning."""
    torch.set_num_threads(1)
    # A plan whose output is remembered makes no call.
    warnings.filterwarnings("ignore", ".* handled no call", UserWarning)
    with tempfile.TemporaryDirectory() as scratch:
        setting = (SKETCHED if is_sketched else SETTINGS)[name]
        model = TunedModel(name, Path(scratch), setting, is_sketched=is_sketched)
        draw = random.Random(name)
        metrics = itertools.islice(itertools.cycle(setting.metrics), number)
        limits = [(metric, model.limit(metric, draw)) for metric in metrics]
        return [model.line(*limit, planner) for limit in limits for planner in model.planners]


class TunedModel:
    """Trained model with its recording, rows and planners, which all of its tunings share."""

    planners: dict[bool, tuple[Planner, float, float]]
    """Planner and its limits, without a sketch and with one."""

    def __init__(self, name: str, scratch: Path, setting: Setting, *, is_sketched: bool) -> None:
        number = len(PARTS) * setting.prompts
        self._name, self._scratch = name, scratch
        self._parts = [range(number)[at :: len(PARTS)] for at in range(len(PARTS))]
        self._runnable, runs = trained_runs(
            name, number, steps=setting.steps, tokens=TOKENS[is_sketched]
        )
        self._accepts = not is_sketched or setting.prompts >= LEAST_PROMPTS
        self._outputs = Outputs(runs)
        exact = QualityBudget("relative_l1", 0.0)
        Judge(
            self._runnable.roots, runs[:1], exact
        ).run_baseline()  # refuses what is not repeatable
        files = TuningDirectory(scratch / "model", {})
        with files.held():
            capture = recorded(self._runnable, runs[0], files, quiet=True)
            rows = priced(self._stages(files, exact).compared(capture), name)
        self._machine = rows[0].machine
        self.planners = {False: planner_of(capture, rows)}
        if is_sketched:
            sketch = make_sketch(
                self._runnable.roots,
                [runs[at] for at in self._parts[0]],
                [find(kernel) for kernel in PRICED],
                model=name,
                pipeline=self._runnable.pipeline,
            )
            self.planners[True] = planner_of(capture, rows, sketch)

    def _stages(self, files: TuningDirectory, budget: QualityBudget) -> Stages:
        kernels, runs = ",".join(PRICED), JudgedRuns(self._runnable, [self._runnable.run])
        return Stages(self._runnable, budget, files, kernels, 1, TimeLimit(None), True, runs)

    def _judges(self, budget: QualityBudget) -> list[CountingJudge]:
        roots, outputs = self._runnable.roots, self._outputs
        return [CountingJudge(roots, outputs, prompts, budget) for prompts in self._parts]

    def line(self, metric: str, limit: float, has_sketch: bool) -> dict[str, Any]:
        """Tune the model within a budget, and judge the plan on the third prompts."""
        begin = time.monotonic()
        budget = QualityBudget(metric, limit)
        search, acceptance, third = self._judges(budget)
        search.run_baseline()
        files = TuningDirectory(self._scratch / f"{budget} {has_sketch}", {})
        accept = acceptance if self._accepts else None
        with files.held():
            chosen = self._stages(files, budget).chosen(search, accept, *self.planners[has_sketch])
        line: dict[str, Any] = {"model": self._name, "sketch": has_sketch}
        line |= {"metric": metric, "limit": budget.limit}
        if isinstance(chosen, str):  # the model keeps its own attention, which is in every budget
            line |= {"holds": True, "saved": 0.0}
        else:
            third.run_baseline()
            quality = third.quality(chosen.plan)
            assert chosen.quality is not None
            line |= {
                "search": search.quality(chosen.plan).worst,
                "acceptance": chosen.quality.worst if self._accepts else None,
                "third": quality.worst,
                "holds": quality.holds,
                "saved": chosen.plan.saved_ms / self._baseline_ms,
            }
        line |= {
            "judged": search.judged + acceptance.judged,
            "seconds": time.monotonic() - begin,
            **{name: getattr(self._machine, name.partition(".")[2]) for name in MACHINE},
        }
        print(*(results.cell(line.get(name)) for name in COLUMNS[: -len(MACHINE)]), sep="\t")
        return line

    @property
    def _baseline_ms(self) -> float:
        """Time of all calls of a run with the model's own attention."""
        planner, _, high = self.planners[False]
        choices = planner(high).choices
        return math.fsum(each.calls * (each.baseline_ms or 0.0) for each in choices)

    def limit(self, metric: str, draw: random.Random) -> float:
        """Draw a limit between the qualities of the fastest plan and of the most careful one."""
        anything = -math.inf if METRICS[metric].is_minimum else math.inf
        search = self._judges(QualityBudget(metric, anything))[0]
        search.run_baseline()
        planner, low, high = self.planners[False]
        plans = planner(high), most_careful(planner, low, high)
        fastest, careful = (loss(metric, search.quality(plan).worst) for plan in plans)
        least = max(careful, LEAST_LOSS * fastest)
        return with_loss(metric, math.exp(draw.uniform(math.log(least), math.log(fastest))))


class Outputs:
    """Results of a model's runs, remembered by plan."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._results: dict[tuple[Key, int], Any] = {}
        self.figures: dict[tuple[str, Sequence[int], Key], tuple[float, ...]] = {}
        """Figures by metric, prompts and plan."""
        self.plan: Key = ()
        """The plan that the model is running with; empty for its own attention."""

    def of(self, prompt: int) -> Any:
        """Return the result for a prompt with the current plan."""
        key = self.plan, prompt
        if key not in self._results:
            self._results[key] = self._runs[prompt]()
        return self._results[key]


class CountingJudge(Judge):
    """Judge that counts plans, and takes the outputs and figures of known plans from `Outputs`."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        outputs: Outputs,
        prompts: Sequence[int],
        budget: QualityBudget,
    ) -> None:
        super().__init__(roots, [partial(outputs.of, prompt) for prompt in prompts], budget)
        self._outputs, self._prompts = outputs, prompts
        self.judged = 0

    def quality(self, plan: Plan) -> Quality:
        self.judged += 1
        known, key = self._outputs.figures, (self._budget.metric, self._prompts, key_of(plan))
        if key not in known:
            self._outputs.plan = key_of(plan)
            try:
                known[key] = super().quality(plan).figures
            finally:
                self._outputs.plan = ()
        return Quality(self._budget, known[key])


def priced(rows: Iterable[Row], name: str) -> list[Row]:
    """Replace the times of rows by those of the real kernels at the size of the full model.

    Raises:
        ValueError: a kernel failed on a call, so that it has no error.
    """
    ms, _ = times(next(model for model in MODELS if model.trained == name))
    found = []
    for row in rows:
        if row.status != "ok":
            raise ValueError(f"{row.kernel} on {row.call.name}: {row.status}, {row.reason}")
        time_ms = summarize([ms[PRICED[row.kernel]]] * SAMPLES)
        found.append(replace(row, time_ms=time_ms, speedup=None, flags=()))
    return found


def most_careful(planner: Planner, low: float, high: float) -> Plan:
    """Return the plan for the smallest limit that still changes a kernel."""
    while high / low > CLOSE:
        limit = math.sqrt(low * high)
        if planner(limit).kernels:
            high = limit
        else:
            low = limit
    return planner(high)


def loss(metric: str, figure: float) -> float:
    """Return the loss of quality: 0 for an output that equals the baseline's."""
    if metric == "psnr":
        return 10 ** (-figure / 20)
    if metric == "perplexity":
        return figure - 1
    return 1 - figure if METRICS[metric].is_minimum else figure


def with_loss(metric: str, size: float) -> float:
    """Return the figure that has a loss, as the inverse of `loss`."""
    if metric == "psnr":
        return -20 * math.log10(size)
    if metric == "perplexity":
        return 1 + size
    return 1 - size if METRICS[metric].is_minimum else size


if __name__ == "__main__":
    main()
