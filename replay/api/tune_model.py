"""Function `tune`, which finds the fastest plan for a live model within a quality budget."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error, check_type
from replay.api.choices import joined_names
from replay.api.chosen_kernels import check_kernels
from replay.api.tuning_stages import Stages
from replay.distribution.time_limit import TimeLimit
from replay.timing.defaults import ROUNDS

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.plan.plan import Plan
    from replay.rows.row import Speedup
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.directory import TuningDirectory
    from replay.tune.judged_runs import JudgedRuns
    from replay.tune.quality import Quality
    from replay.tune.tuning import Tuning


def tune(
    pipe: Any,
    run: Callable[..., Any],
    quality: str = "psnr=35",
    *,
    prompts: Sequence[Any] | None = None,
    kernels: str | Sequence[str | Kernel] | None = None,
    sparse: bool = False,
    out: str | os.PathLike[str] = "plan.json",
    max_time: float | None = None,
    rounds: int = ROUNDS,
    name: str | None = None,
    progress: bool | None = None,
) -> Tuning:
    """Find the fastest plan for a live model whose output stays within a quality budget.

    The model is recorded, and kernels are compared on the recorded calls. Plans are then made for
    several limits on the error of attention, and each runs in the model. The fastest plan within
    the budget is measured beside the model's own attention, and saved.

    The first half of the prompts serves for the search. The fastest plan must then stay within the
    budget on the other half, else a more careful plan is tried. With four prompts or more, it must
    also be expected to stay within the budget on other prompts. The first prompt is recorded and
    timed.

    An interrupted tuning goes on from the directory `OUT.tuning`, which holds the recording, the
    rows and the judged plans. Calling `tune` again with the same model, prompts and kernels resumes
    it, also for another budget.

    Args:
        pipe: the model that `run` uses: a `torch.nn.Module`, a diffusers pipeline, or a dict of
            name → module. It may be compiled.
        run: a function without arguments, or of a prompt, that runs the model once. It returns
            what is judged: a tensor, PIL pictures, numpy frames, a text, the output of a pipeline
            or of `generate`, or `{"input_ids": (1, T), "logits": (1, T, V)}`. Repeated runs must
            give the same output, so fix its seed.
        quality: the budget, which must hold for every prompt: a least `psnr` (dB), `ssim`, `cosine`
            or `top1`, or a largest `relative_l1`, `kl` (nats) or `perplexity` (relative to that of
            the model's own attention).
        prompts: arguments of `run`, at least two; None if it takes none.
        kernels: names and globs of the kernels to choose from; None for the default kernels, "all"
            for every kernel.
        sparse: True to choose from block-sparse attention too, with a share of the blocks for each
            layer, head and range of steps.
        out: file of the plan.
        max_time: seconds after which comparing and searching stop; the best plan so far is kept.
            Calls that were not compared are planned like the nearest compared call.
        rounds: samples per kernel and form of call, divided over its calls.
        name: name of the model in the plan; None for its class name.
        progress: False to hide progress and hints on stderr.

    Returns:
        The result, which prints as one sentence. It has no plan if none is faster.

    Raises:
        Error: an argument cannot be used, the model's own outputs differ by more than the budget,
            or another tuning is writing this plan.
        TypeError: an argument is of the wrong type.

    Example:
        >>> tuning = tune(pipe, lambda: pipe("a panda", generator=seeded()), quality="psnr=35")
        >>> print(tuning)
        >>> with use_plan(tuning.plan):
        ...     pipe("a panda playing guitar")
    """
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.judged_runs import check_arguments

    check_arguments(run, prompts)
    return tune_runnable(
        live_runnable(pipe, run, name),
        quality,
        prompts=prompts,
        kernels=joined_names(kernels),
        sparse=SparseKernel() if sparse else None,
        out=out,
        max_time=max_time,
        rounds=rounds,
        quiet=progress is False,
    )


def live_runnable(pipe: Any, run: Callable[..., Any], name: str | None) -> Any:
    """Return the runnable (`models.Runnable`) of a live model and a function that runs it.

    Raises:
        TypeError: `pipe` contains no module, or `run` is not a function.
    """
    from torch import nn

    from capture.hooks.modules import roots_of
    from capture.models_package import import_models

    check_type("run", run, (Callable,), "a function that runs the model")  # type: ignore[arg-type]
    return import_models().Runnable(
        name=name or type(pipe).__name__,
        roots=roots_of(pipe),
        run=run,
        outputs=lambda result: result,
        weights="the caller's own",
        settings={},
        pipeline=None if isinstance(pipe, (nn.Module, dict)) else pipe,
        for_prompt=lambda prompt: partial(run, prompt),
    )


def tune_runnable(
    runnable: Any,
    quality: str,
    *,
    prompts: Sequence[Any] | None = None,
    text: str | None = None,
    kernels: str | None = None,
    sparse: SparseKernel | None = None,
    out: str | os.PathLike[str] = "plan.json",
    max_time: float | None = None,
    rounds: int = ROUNDS,
    quiet: bool = False,
) -> Tuning:
    """Tune a runnable (`models.Runnable`); the arguments and the result are those of `tune`.

    Args:
        sparse: block-sparse kernel to choose from too; None for none.
        text: a text that a language model is judged on (`replay.tune.judged_runs`), instead of
            prompts.
    """
    from replay.tune.directory import TuningDirectory
    from replay.tune.judged_runs import judged_runs
    from replay.tune.quality import parse_quality

    check_type("out", out, (str, os.PathLike), "the path of a file")
    if os.path.isdir(out):
        raise Error(f"the plan cannot be written to the directory {out}: name a file")
    check_type("max_time", max_time, (int, float, NoneType), "a number of seconds")
    check_type("rounds", rounds, (int,), "a number of samples")
    began = time.monotonic()
    budget = parse_quality(quality)
    check_kernels(kernels, [], guess=False)
    runs = judged_runs(runnable, prompts, text)
    settings = {
        **runnable.settings,
        "model": runnable.name,
        "kernels": kernels,
        "prompts": [*runs.names] or None,
        "sparse": None if sparse is None else sparse.name,
    }
    files = TuningDirectory(Path(f"{os.fspath(out)}.tuning"), settings)
    with files.held():
        stages = Stages(
            runs.runnable, budget, files, kernels, rounds, TimeLimit(max_time), quiet, runs, sparse
        )
        result = stages.result()
        if result.plan is None:
            return result
        from replay.report.tuning import closing_sentence

        assert result.speedup is not None
        assert result.quality is not None
        choice = kernels, sparse is not None
        plan = _with_measured(result.plan, result.speedup, result.quality, runs, files, *choice)
        plan.save(Path(out))
        sentence = closing_sentence(
            plan,
            result.speedup,
            result.quality,
            time.monotonic() - began,
            os.fspath(out),
            runs.judged_on,
        )
        return replace(result, plan=plan, sentence=sentence)


def _with_measured(
    plan: Plan,
    speedup: Speedup,
    quality: Quality,
    runs: JudgedRuns,
    files: TuningDirectory,
    kernels: str | None,
    is_sparse: bool,
) -> Plan:
    """Return a plan with what the tuning measured."""
    from capture.storage.dataset import Dataset
    from replay.plan.measured import Measured
    from replay.tune.conditions import conditions

    census = Dataset.open(str(files.recording)).captures[0].census
    budget = quality.budget
    worst, mean = (
        figure if math.isfinite(figure) else None for figure in (quality.worst, quality.mean)
    )
    measured = Measured(
        budget.metric,
        budget.limit,
        worst,
        mean,
        len(quality.figures),
        bool(runs.kept),
        speedup,
        conditions(
            runs.runnable.roots, census, str(budget), kernels, runs.names, is_sparse=is_sparse
        ),
    )
    return replace(plan, measured=measured)
