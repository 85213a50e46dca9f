"""Function `foretell`, which makes a sketch from which the drift of every plan is foretold."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error, check_type
from replay.api.choices import joined_names
from replay.api.chosen_kernels import check_kernels
from replay.api.messages import shown_steps
from replay.api.tune_model import live_runnable

if TYPE_CHECKING:
    from torch import Tensor

    from replay.kernels.registry import Kernel
    from replay.sketches.sketch import ErrorSketch


def foretell(
    pipe: Any,
    run: Callable[..., Any],
    *,
    prompts: Sequence[Any] | None = None,
    kernels: str | Sequence[str | Kernel] | None = None,
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: bool | None = None,
) -> ErrorSketch:
    """Make a sketch, which foretells the drift of the model's output with any plan.

    The model runs with gradients, once for each prompt, and every kernel runs beside its own
    attention. Backward passes then tell how an error at each layer and step reaches the output. The
    sketch takes at most 40 forward and backward passes, however many plans it foretells; the
    more prompts, the better it foretells other prompts. The graph of a whole run must fit into
    memory. Kernels run in this process, so choose kernels that a replay ran before.

    Args:
        pipe: the model that `run` uses: a `torch.nn.Module`, a diffusers pipeline, or a dict of
            name → module.
        run: a function without arguments, or of a prompt, that runs the model once, at most under
            `torch.no_grad()`. It returns the output of a pipeline or of `generate` (with
            `output_logits=True`), `{"input_ids": (1, T), "logits": (1, T, V)}`, or a tensor.
        prompts: arguments of `run`, best 13; the first 13 are used. None if it takes none.
        kernels: names and globs of the kernels; None for the default kernels that run here.
        out: file of the sketch, which `verify` reads; None to write none.
        name: name of the model; None for its class name.
        progress: False to hide progress on stderr.

    Returns:
        A sketch: `sketch.foretell(plan)` returns the error, and the PSNR or KL.

    Raises:
        Error: an argument cannot be used, or the run has no gradients.
        TypeError: an argument is of the wrong type.

    Example:
        >>> sketch = foretell(pipe, lambda prompt: pipe(prompt, generator=seeded()), prompts=texts)
        >>> sketch.foretell(Plan.load("plan.json")).psnr
    """
    from replay.tune.judged_runs import check_arguments

    check_arguments(run, prompts)
    return foretell_runnable(
        live_runnable(pipe, run, name),
        prompts=prompts,
        kernels=joined_names(kernels),
        out=out,
        quiet=progress is False,
    )


def foretell_runnable(
    runnable: Any,
    *,
    prompts: Sequence[Any] | None = None,
    text: str | None = None,
    kernels: str | None = None,
    out: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> ErrorSketch:
    """Make the sketch of a runnable (`models.Runnable`); arguments are those of `foretell`.

    Args:
        text: a text that a language model reads in windows, instead of prompts.
    """
    from replay.sketches.make_sketch import PROMPTS, make_sketch
    from replay.tune.judged_runs import judged_runs

    check_type("out", out, (str, os.PathLike, type(None)), "the path of a file")
    check_kernels(kernels, [], guess=False)
    runs = judged_runs(runnable, prompts, text).runs[:PROMPTS]
    chosen = running_here(kernels, runnable)
    with shown_steps(quiet=quiet) as step:
        step("foretelling: first run")
        sketch = make_sketch(
            runnable.roots,
            runs,
            chosen,
            model=runnable.name,
            pipeline=runnable.pipeline,
            pictures=pictures,
            done=lambda number, total: step(f"foretelling: {number} of {total} passes"),
        )
    if out is not None:
        sketch.save(os.fspath(out))
    return sketch


def running_here(names: str | None, runnable: Any) -> list[Kernel]:
    """Return the chosen kernels that can run on the model's device.

    Raises:
        Error: none can, or one that was named cannot.
    """
    import torch

    from replay.end_to_end.model_process import OWN
    from replay.kernels.registry import select

    weights = (each for root in runnable.roots.values() for each in root.parameters())
    device = next((each.device for each in weights), torch.device("cpu"))
    chosen, named = select(names)
    found = []
    for kernel in chosen:
        kernel = kernel.loaded()
        reason = kernel.unavailable(device)
        if reason and kernel.name in named:
            raise Error(f"{kernel.name} cannot run on {device}: {reason}")
        if not reason and kernel.name != OWN:
            found.append(kernel)
    if not found:
        raise Error("no kernel to foretell: choose some with --kernels")
    return found


def pictures(result: Any) -> Tensor | None:
    """Return the pictures or frames in a run's result, with values in [0, 1]; None without any."""
    from replay.tune.outputs import OutputError, named_tensors

    try:
        tensors = named_tensors(result)
    except OutputError:
        return None
    return next((tensors[name] for name in ("images", "frames") if name in tensors), None)
