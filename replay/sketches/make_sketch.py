"""Maker of a sketch: runs a model with gradients, and every kernel beside its own attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from replay.kernels.registry import Kernel
from replay.patch.use_kernel import use_kernel
from replay.sketches.final_output import (
    VAE,
    DecodedLatents,
    FinalOutput,
    error_between,
    final_output,
)
from replay.sketches.sketch import ErrorSketch, Place
from replay.sketches.traced_run import TracedRun, traced

PROMPTS = 13
"""Number of prompts from which the error is foretold, if there are as many."""

RUNS = 40
"""Largest number of forward and backward passes by default, with one run for the pictures."""


Pictures = Callable[[Any], Tensor | None]
"""Function that returns the pictures in a run's result, with values in [0, 1]; None without any."""


Columns = Callable[[str, int], Sequence[str]]
"""Function of a kernel's name and a number of heads that names the kernel at each head alone."""


@dataclass(frozen=True)
class _Prompt:
    """Passes over one prompt."""

    output: FinalOutput
    """Final output without its graph."""
    result: Any
    scores: list[dict[Place, Tensor]]
    """Scores of each direction by place, (kernels, heads)."""
    local: dict[Place, Tensor]


def make_sketch(
    roots: Mapping[str, nn.Module],
    runs: Sequence[Callable[[], Any]],
    kernels: Sequence[Kernel],
    *,
    model: str,
    pipeline: Any = None,
    directions: int | None = None,
    by_head: Columns | None = None,
    seed: int = 0,
    pictures: Pictures = lambda result: None,
    done: Callable[[int, int], None] = lambda number, total: None,
) -> ErrorSketch:
    """Make the sketch of a model's error with each kernel at each place.

    A run takes a forward pass, and a backward pass for each direction. The graph of the whole run
    is kept meanwhile. If it does not fit into a GPU's memory, the activations of denoisers are
    computed again in the backward passes, which then take about twice the time.

    Args:
        roots: the model's modules, by name.
        runs: a run for each prompt.
        kernels: kernels that ran on the model's calls before; where a kernel does not support a
            call, its error is 0, because the model keeps its own attention there.
        model: name of the model.
        pipeline: the pipeline of the modules, whose scheduler counts the steps.
        directions: random directions for each prompt; None for as many as fit into `RUNS`.
        by_head: names of the sketch's kernels, each the kernel at one head; None for the kernels.
        pictures: with latents, one more run relates their error to the PSNR of the pictures.
        done: function that receives the number of passes done, and of all.

    Raises:
        GradientError: the runs have no gradients, or no output whose error can be foretold.
        KernelOutputError: a kernel's output does not fit a call.
    """
    directions = directions or max((RUNS - 1) // len(runs) - 1, 1)
    generator = torch.Generator().manual_seed(seed)
    total = len(runs) * (1 + directions)
    prompts: list[_Prompt] = []
    recompute = False

    def passed(run: Callable[[], Any]) -> _Prompt | None:
        """Return the passes over a prompt; None if they do not fit without recomputing."""
        before = len(prompts) * (1 + directions)
        scores = []
        try:
            with traced(roots, run, kernels, pipeline, recompute=recompute) as one:
                done(before + 1, total)
                for at in range(1, directions + 1):
                    u = one.output.direction(generator)
                    scores.append(one.scores(u, keep=at < directions))
                    done(before + 1 + at, total)
                return _without_graph(one, scores)
        except torch.OutOfMemoryError:
            if recompute:
                raise
            return None

    for run in runs:
        found = passed(run)
        if found is None:
            recompute = True
            found = passed(run)
        assert found is not None
        prompts.append(found)
    return _sketch(model, roots, runs[0], kernels, prompts, by_head, pictures, total)


def _without_graph(run: TracedRun, scores: list[dict[Place, Tensor]]) -> _Prompt:
    output = replace(run.output, tensor=run.output.tensor.detach())
    return _Prompt(output, run.result, scores, run.local())


def _sketch(
    model: str,
    roots: Mapping[str, nn.Module],
    run: Callable[[], Any],
    kernels: Sequence[Kernel],
    prompts: Sequence[_Prompt],
    by_head: Columns | None,
    pictures: Pictures,
    runs: int,
) -> ErrorSketch:
    scores = [each for prompt in prompts for each in prompt.scores]
    places = list(dict.fromkeys(place for each in scores for place in each))
    names = {place: _names(kernels, scores, place, by_head) for place in places}
    columns = list(dict.fromkeys(name for each in names.values() for name in each))

    def table(parts: Mapping[Place, Tensor]) -> Tensor:
        """Return figures (places, columns); 0 where a place has none."""
        found = torch.zeros(len(places), len(columns))
        for at, place in enumerate(places):
            if place in parts:
                part = parts[place] if by_head else parts[place].sum(1)
                found[at, [columns.index(name) for name in names[place]]] = part.flatten()
        return found

    local = torch.stack([table(prompt.local) for prompt in prompts]).mean(0)
    level = _picture_level(prompts[0], roots, run, kernels, local, pictures)
    return ErrorSketch(
        model,
        prompts[0].output.measure,
        columns,
        places,
        [at for at, prompt in enumerate(prompts) for _ in prompt.scores],
        torch.stack([table(each) for each in scores]),
        local,
        runs + (level is not None),
        level,
    )


def _names(
    kernels: Sequence[Kernel],
    scores: Sequence[Mapping[Place, Tensor]],
    place: Place,
    by_head: Columns | None,
) -> list[str]:
    if by_head is None:
        return [kernel.name for kernel in kernels]
    heads = next(each[place] for each in scores if place in each).shape[1]
    return [name for kernel in kernels for name in by_head(kernel.name, heads)]


def _picture_level(
    first: _Prompt,
    roots: Mapping[str, nn.Module],
    run: Callable[[], Any],
    kernels: Sequence[Kernel],
    errors: Tensor,
    pictures: Pictures,
) -> float | None:
    """Return `ErrorSketch.picture_db`, from a run with the kernel of median error everywhere.

    Args:
        errors: squared error of each kernel at each place.
    """
    own = pictures(first.result)
    if own is None or first.output.measure == "kl":
        return None
    order = errors.sum(0).argsort()
    kernel = kernels[int(order[len(order) // 2])]
    decoded = DecodedLatents()
    # Errors of the decoder's own attention are not those of latents.
    others = {name: root for name, root in roots.items() if name != VAE}
    with decoded.kept(roots), use_kernel(kernel.name, others), torch.no_grad():
        result = run()
    other = pictures(result)
    error = error_between(first.output, final_output(result, decoded.latest))
    if other is None or not error:
        return None
    mse = (own.double() - other.double()).square().mean()
    return float(20 * math.log10(error) - 10 * mse.log10()) if mse else None
