"""Compares tuned block-sparse plans with exhaustive search, on the trained Flux (no GPU needed).

    python -m benchmarks.sparse_tuning [--prompts 1] [--out FILE]     (5 minutes a prompt)

Writes `benchmarks/results/sparse_tuning.csv`, one line for each prompt, budget and way to tune.

The heads of two layers are sparse: 2 layers × 2 heads × 3 shares of the blocks × 2 ranges of steps
are 6,561 plans. The kernel is `emulated_block_sparse.py`, so the speed of a plan is the inverse of
the number of blocks that these layers visit, and its drift is the relative L1 error of the final
latents.

`tune`'s own planner and search choose a plan within each budget. The exhaustive search takes the
fewest blocks of all plans whose drift is not larger than that of the tuned plan. All plans would
take two hours, so only plans that may be the best are measured: the drift of every plan is foretold
by the sum of the latents' errors with one sparse head at a time, and a plan is left out if this is
more than `MARGIN` times the least foretold drift of as many blocks.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention_replay as ar
from benchmarks import results
from benchmarks.emulated_block_sparse import EMULATED, KEYS
from benchmarks.trained_runs import trained_runs
from capture.storage.dataset import Dataset
from replay.api.tune_model import live_runnable
from replay.api.tuning_planner import planner_of
from replay.api.tuning_recording import recorded
from replay.api.tuning_stages import Stages
from replay.distribution.time_limit import TimeLimit
from replay.end_to_end.model_process import OWN
from replay.end_to_end.run_pace import RunPace
from replay.kernels.registry import find
from replay.plan.choose import WithinTotal
from replay.plan.plan import Budget, Plan
from replay.sketches.make_sketch import make_sketch
from replay.sketches.sketch import ErrorSketch
from replay.sparsity.candidates import SparseCandidates
from replay.sparsity.examined_calls import Examination, examine
from replay.sparsity.foretold_sensitivity import DIRECTIONS, by_head, kernels_of
from replay.sparsity.settings import DENSE, Setting, named, shares_of
from replay.tune.directory import TuningDirectory
from replay.tune.judged_runs import JudgedRuns
from replay.tune.quality import Quality, QualityBudget
from replay.tune.search import Key, Planner, Trial, key_of, search
from replay.workloads.sources import RecordedSource
from replay.workloads.workload import Workload

STEPS, TOKENS = 4, 1088
BLOCKS = TOKENS // KEYS
LAYERS = ("transformer.transformer_blocks.0.attn", "transformer.single_transformer_blocks.1.attn")
HEADS = 2
SHARES = (0.3, 0.5, DENSE)
BUDGETS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24)
MARGIN = 1.3
MACHINE = ("machine.device", "machine.python", "machine.torch")
COLUMNS = (
    *("prompt", "sensitivities", "budget", "drift", "blocks", "blocks.exhaustive", "speed"),
    *("trials", "plans.measured", "foretold.worst"),
    *MACHINE,
)

Choice = tuple[float, ...]
"""Share of each head at each cell, which is a layer in a range of steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "sparse_tuning.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for prompt in range(arguments.prompts):
        with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
            for line in compared(prompt, Path(scratch)):
                lines.append(line)
                print(
                    *(results.cell(line.get(name)) for name in COLUMNS[:-3]), sep="\t", flush=True
                )
        results.write_lines(lines, COLUMNS, arguments.out)


class Denoising:
    """Denoising steps of a trained Flux, whose latents depend on the plan."""

    def __init__(self, prompt: int) -> None:
        runnable, runs = trained_runs("flux", prompt + 1, steps=STEPS)
        self._model = runnable.pipeline.transformer
        self._inputs: list[dict[str, Any]] = []
        hook = self._model.register_forward_pre_hook(
            lambda module, args, kwargs: self._inputs.append(kwargs), with_kwargs=True
        )
        runs[prompt]()
        hook.remove()
        self._sigmas = runnable.pipeline.scheduler.sigmas
        self.runnable = live_runnable({"transformer": self._model}, self.latents, "flux")
        self.own = self.latents()

    def latents(self) -> Tensor:
        """Return the final latents, from Euler steps of flow matching."""
        latents: Tensor = self._inputs[0]["hidden_states"]
        for step, inputs in enumerate(self._inputs):
            (velocity, *_) = self._model(
                **{**inputs, "hidden_states": latents, "return_dict": False}
            )
            latents = latents + (self._sigmas[step + 1] - self._sigmas[step]) * velocity
        return latents

    def with_plan(self, plan: Plan) -> Tensor:
        """Return the final latents with a plan."""
        with ar.use_plan(plan, {"transformer": self._model}, trust_code=True):
            return self.latents()


class Problem:
    """Plans for the heads of two layers, and their drift."""

    def __init__(self, prompt: int, scratch: Path) -> None:
        self.denoising = Denoising(prompt)
        runnable = self.denoising.runnable
        files = TuningDirectory(scratch / "tuning", {})
        with files.held():
            ranges = 2
            layers = len(LAYERS) + 1
            self.capture = recorded(
                runnable, self.denoising.latents, files, quiet=True, most=ranges * layers
            )
            stages = Stages(
                runnable,
                QualityBudget("relative_l1", 0.0),
                files,
                OWN,
                6,
                TimeLimit(None),
                True,
                JudgedRuns(runnable, [runnable.run]),
            )
            self.rows = stages.compared(self.capture)
        self.machine = self.rows[0].machine
        entries = [
            entry
            for entry in Dataset.open(str(files.recording)).entries
            if entry.origin.module in LAYERS
        ]
        settings = [Setting("keep", share) for share in SHARES if share < DENSE]
        workloads = [Workload.of(RecordedSource(entry)) for entry in entries]
        own = dict.fromkeys((each.name for each in workloads), OWN)
        device, limit = torch.device("cpu"), TimeLimit(None)
        found = Examination()
        examine(workloads, EMULATED, settings, own, device, RunPace(), limit, found)
        self.candidates = SparseCandidates(EMULATED.name, settings, found.calls)
        self._maker = WithinTotal(
            self.rows, self.capture.census, Budget("relative_l1", 1e9), OWN, more=self.candidates
        )
        self._cells = [
            at for at, cell in enumerate(self._maker.cells) if self.candidates.heads(cell)
        ]
        self._latents: dict[Key, Tensor] = {}

    @property
    def number(self) -> int:
        """Number of shares in a choice."""
        return HEADS * len(self._cells)

    def plan(self, choice: Choice) -> Plan:
        parts = [choice[at : at + HEADS] for at in range(0, self.number, HEADS)]
        names = {
            cell: named(EMULATED.name, "keep", shares)
            for cell, shares in zip(self._cells, parts, strict=True)
            if min(shares) < DENSE
        }
        return self._maker.plan_with(names)

    def error(self, plan: Plan) -> Tensor:
        """Return the error of the final latents with a plan."""
        key = key_of(plan)
        if key not in self._latents:
            self._latents[key] = self.denoising.with_plan(plan) - self.denoising.own
        return self._latents[key]

    def drift(self, error: Tensor) -> float:
        return float(error.abs().sum() / self.denoising.own.abs().sum())

    def sketch(self) -> ErrorSketch:
        """Return the sketch from which `tune` takes the sensitivities."""
        return make_sketch(
            self.denoising.runnable.roots,
            [self.denoising.latents],
            [find(name) for name in kernels_of(EMULATED.name)],
            model="flux",
            directions=DIRECTIONS,
            by_head=by_head,
        )

    def tuned(self, budget: float, planner: Planner, low: float, high: float) -> tuple[Plan, int]:
        """Return the fastest plan within a budget that `tune` finds, and the number of trials."""
        limit = QualityBudget("relative_l1", budget)

        def judge(error_limit: float, plan: Plan) -> Trial:
            return Trial(error_limit, plan, Quality(limit, (self.drift(self.error(plan)),)))

        trials = list(search(planner, judge, low, high))
        held = [trial.plan for trial in trials if trial.holds]
        return max(held, key=lambda plan: plan.saved_ms), len(trials)


def blocks(plan: Plan) -> int:
    """Return the number of blocks that a tile visits, summed over layers, heads and steps."""
    total = 0
    for layer, step in itertools.product(LAYERS, range(STEPS)):
        kernel = plan.kernel_at(layer, "denoise", TOKENS, step)
        shares = [DENSE] * HEADS if kernel == OWN else shares_of(kernel, HEADS)[1]
        total += sum(max(int(share * BLOCKS + 0.5), 1) for share in shares)
    return total


def exhaustive(problem: Problem) -> tuple[list[tuple[int, float]], float]:
    """Measure the plans that may be the best.

    Returns:
        Blocks and drift of each plan, and the largest ratio of a measured to a foretold drift, or
        of the foretold to the measured one.
    """
    dense = (DENSE,) * problem.number
    errors = {
        (at, share): problem.error(problem.plan((*dense[:at], share, *dense[at + 1 :])))
        for at, share in itertools.product(range(problem.number), SHARES[:-1])
    }
    plans, foretold = {}, {}
    for choice in itertools.product(SHARES, repeat=problem.number):
        parts = [errors[at, share] for at, share in enumerate(choice) if share < DENSE]
        if parts:
            foretold[choice] = problem.drift(torch.stack(parts).sum(dim=0))
            plans[choice] = sum(max(int(share * BLOCKS + 0.5), 1) for share in choice)
    least = {
        number: min(foretold[choice] for choice in plans if plans[choice] <= number)
        for number in {*plans.values()}
    }
    found, worst = [], 1.0
    for choice, number in plans.items():
        if foretold[choice] <= MARGIN * least[number]:
            plan = problem.plan(choice)
            drift = problem.drift(problem.error(plan))
            found.append((blocks(plan), drift))
            ratio = drift / foretold[choice]
            worst = max(worst, ratio, 1 / ratio)
    return found, worst


def compared(prompt: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield a line for each way to tune and budget."""
    problem = Problem(prompt, scratch)
    measured, worst = exhaustive(problem)
    machine = {name: getattr(problem.machine, name.partition(".")[2]) for name in MACHINE}
    for name, sketch in (("foretold", problem.sketch()), ("none", None)):
        planner, low, high = planner_of(
            problem.capture, problem.rows, sketch, sparse=problem.candidates
        )
        for budget in BUDGETS:
            plan, trials = problem.tuned(budget, planner, low, high)
            drift, visited = problem.drift(problem.error(plan)), blocks(plan)
            best = min([visited, *(number for number, other in measured if other <= drift)])
            yield {
                "prompt": prompt,
                "sensitivities": name,
                "budget": budget,
                "drift": drift,
                "blocks": visited,
                "blocks.exhaustive": best,
                "speed": best / visited,
                "trials": trials,
                "plans.measured": len(measured),
                "foretold.worst": worst,
                **machine,
            }


if __name__ == "__main__":
    main()
