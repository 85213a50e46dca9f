"""Function `tune`, which finds the fastest plan for a live model within a quality budget."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.api.choices import joined_names
from replay.api.tuning_stages import Stages
from replay.distribution.time_limit import TimeLimit
from replay.timing.defaults import ROUNDS

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.tune.tuning import Tuning

JUDGED_ON_ITSELF = "judged on the run it was tuned on"


def tune(
    pipe: Any,
    run: Callable[..., Any],
    quality: str = "psnr=35",
    *,
    prompts: Sequence[Any] | None = None,
    kernels: str | Sequence[str | Kernel] | None = None,
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
    budget on the other half, else a more careful plan is tried. The first prompt is recorded and
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
        out: file of the plan.
        max_time: seconds after which comparing and searching stop; the best plan so far is kept.
        rounds: samples per kernel and call.
        name: name of the model in the plan; None for its class name.
        progress: False to hide progress and hints on stderr.

    Returns:
        The result, which prints as one sentence. It has no plan if none is faster.

    Raises:
        Error: an argument cannot be used, the model's own outputs differ by more than the budget,
            or another tuning is writing this plan.

    Example:
        >>> tuning = tune(pipe, lambda: pipe("a panda", generator=seeded()), quality="psnr=35")
        >>> print(tuning)
        >>> with use_plan(tuning.plan):
        ...     pipe("a panda playing guitar")
    """
    from torch import nn

    from capture.hooks.modules import roots_of
    from capture.models_package import import_models

    roots = roots_of(pipe)
    runnable = import_models().Runnable(
        name=name or type(pipe).__name__,
        roots=roots,
        run=run,
        outputs=lambda result: result,
        weights="the caller's own",
        settings={},
        pipeline=None if isinstance(pipe, (nn.Module, dict)) else pipe,
    )
    return tuned(
        runnable,
        quality,
        prompts=prompts,
        kernels=joined_names(kernels),
        out=out,
        max_time=max_time,
        rounds=rounds,
        quiet=progress is False,
    )


def tuned(
    runnable: Any,
    quality: str,
    *,
    prompts: Sequence[Any] | None = None,
    kernels: str | None = None,
    out: str | os.PathLike[str] = "plan.json",
    max_time: float | None = None,
    rounds: int = ROUNDS,
    quiet: bool = False,
) -> Tuning:
    """Tune a runnable (`models.Runnable`); the arguments and the result are those of `tune`."""
    from replay.tune.directory import TuningDirectory, TuningError
    from replay.tune.quality import parse_quality

    began = time.monotonic()
    budget = parse_quality(quality)
    if prompts is not None and len(prompts) < 2:
        raise TuningError(
            "prompts must be at least two, because half of them are kept for acceptance: give "
            "more, or a run() without arguments"
        )
    settings = {
        **runnable.settings,
        "model": runnable.name,
        "kernels": kernels,
        "prompts": None if prompts is None else [str(prompt) for prompt in prompts],
    }
    files = TuningDirectory(Path(f"{os.fspath(out)}.tuning"), settings)
    with files.held():
        stages = Stages(
            runnable, budget, files, kernels, rounds, TimeLimit(max_time), quiet, prompts
        )
        result = stages.result()
        if result.plan is None:
            return result
        from replay.report.tuning import closing_sentence

        assert result.speedup is not None
        assert result.quality is not None
        result.plan.save(Path(out))
        sentence = closing_sentence(
            result.plan,
            result.speedup,
            result.quality,
            time.monotonic() - began,
            os.fspath(out),
            JUDGED_ON_ITSELF if prompts is None else "",
        )
        return replace(result, sentence=sentence)
