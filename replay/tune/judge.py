"""Runs a live model with plans, and compares its output with that of its own attention."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_replay.errors import Error
from capture.errors import described
from replay.kernels.failures import classify
from replay.kernels.kernel_names import shortened
from replay.patch.use_kernel import use_plan
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Plan
from replay.tune.directory import TuningError
from replay.tune.judged_runs import Run
from replay.tune.outputs import named_tensors
from replay.tune.quality import Quality, QualityBudget
from replay.tune.search import Trial

Around = Callable[[str, Callable[[], dict[str, Tensor]]], dict[str, Tensor]]
"""Function that shows the progress of a described run, and returns its result."""


class Judge:
    """Judge of plans by the model's output for some prompts.

    Args:
        roots: the model's modules, by name.
        runs: a run for each prompt. Two runs of the same prompt must give the same output.

    Attributes:
        around: function that shows the progress of a run.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        runs: Sequence[Run],
        budget: QualityBudget,
    ) -> None:
        self._roots, self._runs, self._budget = dict(roots), runs, budget
        self.around: Around = lambda what, run: run()
        self._baselines: list[dict[str, Tensor]] = []

    @property
    def runs(self) -> int:
        """Number of runs per plan."""
        return len(self._runs)

    @property
    def fingerprint(self) -> str:
        """Digest of the baseline's outputs, which differs if the model or a prompt changed."""
        digest = hashlib.sha256()
        for outputs in self._baselines:
            for name, tensor in outputs.items():
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def run_baseline(self) -> float:
        """Run each prompt with the model's own attention, and return the seconds of a run.

        Every prompt runs twice, because an output that differs from itself judges nothing. The
        seconds are the mean of the second runs, after the first ones have warmed up.

        Raises:
            TuningError: a run failed, has NaN, or two runs of a prompt differ by more than the
                budget.
            OutputError: the result of a run cannot be judged.
            QualityError: the budget's metric cannot be computed from the result.
        """
        seconds = 0.0
        self._baselines = []
        for run in self._runs:
            try:
                first = self._output("the model's own attention", run)
            except Error:
                raise
            except Exception as error:
                raise TuningError(
                    f"run() failed under torch.no_grad(), before any kernel was swapped in: "
                    f"{described(error)}"
                ) from error
            begin = time.perf_counter()
            second = self._output("the model's own attention again", run)
            seconds += time.perf_counter() - begin
            if name := next((name for name, each in first.items() if _has_nan(each)), ""):
                raise TuningError(
                    f"the model's own attention gives NaN in {name}: `replay doctor` names the "
                    "cause"
                )
            self._check_own(first, second)
            self._baselines.append(first)
        return seconds / len(self._runs)

    def check_baseline(self) -> None:
        """Run the first prompt with the model's own attention again.

        Raises:
            TuningError: the output changed since `run_baseline`.
        """
        self._check_own(
            self._baselines[0], self._output("the model's own attention", self._runs[0])
        )

    def _check_own(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        shapes = [
            {name: tuple(each.shape) for name, each in run.items()} for run in (first, second)
        ]
        if shapes[0] != shapes[1]:
            raise TuningError(
                f"two runs of the model's own attention returned {shapes[0]} and {shapes[1]}: make "
                "run() repeatable, for example by a generator with a fixed seed"
            )
        own = self._budget.figure(first, second)
        if not self._budget.holds(own):
            raise TuningError(
                f"two runs of the model's own attention already differ by more than "
                f"{self._budget}, with {self._budget.shown(own)}: make run() repeatable, for "
                "example by a generator with a fixed seed, and let it leave the model as it was, "
                f"or choose a budget that allows {self._budget.shown(own)}"
            )

    def quality(self, plan: Plan) -> Quality:
        """Run every prompt with a plan, and return the quality of the outputs.

        Raises:
            Exception: a kernel or the model failed.
        """
        figures = []
        other_lengths: list[KeyLengths] = []
        for run, baseline in zip(self._runs, self._baselines, strict=True):

            def planned(run: Run = run) -> Any:
                # The plan was made here, of kernels that the user named.
                with use_plan(plan, self._roots, any_device=True, trust_code=True) as swap:
                    swap.advice = ""  # one prompt is recorded, and these are judged
                    result = run()
                if swap.other_lengths is not None:
                    other_lengths.append(swap.other_lengths)
                return result

            what = ", ".join(dict.fromkeys(map(shortened, plan.kernels)))
            output = self._output(what, planned)
            figures.append(self._budget.figure(baseline, output))
        others = None
        if other_lengths:
            lows, highs = zip(*other_lengths, strict=True)
            others = KeyLengths(min(lows), max(highs))
        return Quality(self._budget, tuple(figures), other_lengths=others)

    def trial(self, limit: float, plan: Plan) -> Trial:
        """Judge a plan that was made for a limit; a plan that fails in the model does not hold."""
        try:
            return Trial(limit, plan, self.quality(plan))
        except Exception as error:
            return Trial(limit, plan, None, classify(error)[1])

    def _output(self, what: str, run: Run) -> dict[str, Tensor]:
        def output() -> dict[str, Tensor]:
            with torch.no_grad():
                return named_tensors(run())

        return self.around(what, output)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())
