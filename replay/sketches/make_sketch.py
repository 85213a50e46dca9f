"""Maker of a sketch: runs a model with gradients, and every kernel beside its own attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture.hooks.entry_points import follow_entry_points
from capture.hooks.interceptor import Arguments, intercept
from capture.hooks.modules import ModuleTracker
from replay.kernels.registry import Kernel
from replay.patch.call_counts import CallCounts, Swap
from replay.patch.call_dispatcher import CallDispatcher
from replay.patch.planned_modules import key_length
from replay.patch.use_kernel import use_kernel
from replay.sketches.final_output import (
    VAE,
    DecodedLatents,
    FinalOutput,
    error_between,
    final_output,
)
from replay.sketches.gradients_on import GradientError, check_gradients, gradients_on
from replay.sketches.sketch import ErrorSketch, Place

PROMPTS = 13
"""Number of prompts from which the error is foretold, if there are as many."""

RUNS = 40
"""Largest number of forward and backward passes by default, with one run for the pictures."""


Pictures = Callable[[Any], Tensor | None]
"""Function that returns the pictures in a run's result, with values in [0, 1]; None without any."""


@dataclass(frozen=True)
class _Call:
    """Attention call of a run."""

    place: Place
    leaf: Tensor
    """Zeros that were added to the output, so that they receive its gradient."""
    errors: list[Tensor]
    """Output of each kernel minus the model's own."""
    energy: float
    """Squared norm of the model's own output."""


class Traced(NamedTuple):
    """Run with gradients."""

    output: FinalOutput
    calls: list[_Call]
    result: Any
    """Object that the run returned."""


def make_sketch(
    roots: Mapping[str, nn.Module],
    runs: Sequence[Callable[[], Any]],
    kernels: Sequence[Kernel],
    *,
    model: str,
    pipeline: Any = None,
    directions: int | None = None,
    seed: int = 0,
    pictures: Pictures = lambda result: None,
    done: Callable[[int, int], None] = lambda number, total: None,
) -> ErrorSketch:
    """Make the sketch of a model's error with each kernel at each place.

    A run takes a forward pass, and a backward pass for each direction. The graph of the whole run
    is kept meanwhile, with the errors of all kernels.

    Args:
        roots: the model's modules, by name.
        runs: a run for each prompt.
        kernels: kernels that ran on the model's calls before; where a kernel does not support a
            call, its error is 0, because the model keeps its own attention there.
        model: name of the model.
        pipeline: the pipeline of the modules, whose scheduler counts the steps.
        directions: random directions for each prompt; None for as many as fit into `RUNS`.
        pictures: with latents, one more run relates their error to the PSNR of the pictures.
        done: function that receives the number of passes done, and of all.

    Raises:
        GradientError: the runs have no gradients, or no output whose error can be foretold.
        KernelOutputError: a kernel's output does not fit a call.
    """
    directions = directions or max((RUNS - 1) // len(runs) - 1, 1)
    generator = torch.Generator().manual_seed(seed)
    total = len(runs) * (1 + directions)
    scores: list[dict[Place, Tensor]] = []
    local: dict[Place, Tensor] = {}
    first: Traced | None = None
    for number, run in enumerate(runs):
        one = traced(roots, run, kernels, pipeline)
        first = first or Traced(_without_graph(one.output), [], one.result)
        done(number * (1 + directions) + 1, total)
        for place, energy in _local(one.calls).items():
            local[place] = local.get(place, 0) + energy / len(runs)
        for at in range(1, directions + 1):
            u = one.output.direction(generator)
            scores.append(_scores(one.output, u, one.calls, keep=at < directions))
            done(number * (1 + directions) + 1 + at, total)
    assert first is not None
    places = list(dict.fromkeys(place for each in scores for place in each))
    zeros = torch.zeros(len(kernels))
    errors = torch.stack([local[at] for at in places])
    level = _picture_level(first, roots, runs[0], kernels, errors, pictures)
    return ErrorSketch(
        model,
        first.output.measure,
        [kernel.name for kernel in kernels],
        places,
        [prompt for prompt in range(len(runs)) for _ in range(directions)],
        torch.stack([torch.stack([each.get(at, zeros) for at in places]) for each in scores]),
        errors,
        total + (level is not None),
        level,
    )


def _without_graph(output: FinalOutput) -> FinalOutput:
    return replace(output, tensor=output.tensor.detach())


def _picture_level(
    first: Traced,
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


def traced(
    roots: Mapping[str, nn.Module],
    run: Callable[[], Any],
    kernels: Sequence[Kernel],
    pipeline: Any = None,
) -> Traced:
    """Run a model once with gradients, and every kernel on each of its attention calls.

    Raises:
        GradientError: the run has no gradients, or no output whose error can be foretold.
    """
    calls: list[_Call] = []
    tracker, decoded = ModuleTracker(roots, pipeline), DecodedLatents()
    dispatchers = [_dispatcher(kernel) for kernel in kernels]

    def handle(
        arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        check_gradients()
        own = proceed()
        if not torch.is_grad_enabled() or not isinstance(own, Tensor):
            return own  # in the decoder of latents
        site = tracker.site
        place = Place(site.module, site.phase, key_length(arguments), site.step)
        before = own.detach()
        with _without_gradients():
            fields = arguments._asdict()
            tensors = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
            detached: Any = {name: each.detach() for name, each in tensors.items()}
            given = arguments._replace(**detached)
            errors = [each.handle(given, lambda: before, sdpa) - before for each in dispatchers]
        leaf = torch.zeros_like(own, requires_grad=True)
        calls.append(_Call(place, leaf, errors, float(before.float().square().sum())))
        return own + leaf

    with (
        gradients_on(roots),
        decoded.kept(roots),
        tracker.watch(),
        intercept(handle),
        follow_entry_points(handle),
    ):
        try:
            result = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise GradientError(
                f"the run fails with gradients ({error}): let it return tensors instead of numpy "
                "arrays, and change no tensor in place"
            ) from error
    output = final_output(result, decoded.latest)
    if not calls:
        raise GradientError(
            "the run made no attention call that can be followed: there is nothing to foretell"
        )
    if not output.tensor.requires_grad:
        raise GradientError(
            "the run's output has no gradients: return tensors that were not detached, such as "
            "latents or logits"
        )
    return Traced(output, calls, result)


def _dispatcher(kernel: Kernel) -> CallDispatcher:
    kernel = kernel.loaded()
    swap = Swap({kernel.name: CallCounts()})
    return CallDispatcher(
        swap, {kernel.name: kernel}, lambda arguments: kernel.name, contextlib.nullcontext
    )


def _local(calls: Sequence[_Call]) -> dict[Place, Tensor]:
    """Return the squared relative error of each kernel at each place."""
    errors: dict[Place, Tensor] = {}
    energies: dict[Place, float] = {}
    for call in calls:
        found = torch.stack([each.float().square().sum().cpu() for each in call.errors])
        errors[call.place] = errors.get(call.place, 0) + found
        energies[call.place] = energies.get(call.place, 0.0) + call.energy
    return {place: each / max(energies[place], 1e-30) for place, each in errors.items()}


def _scores(
    output: FinalOutput, u: Tensor, calls: Sequence[_Call], *, keep: bool
) -> dict[Place, Tensor]:
    """Return ⟨u, J ε⟩ of each kernel over the output's scale, by place."""
    leaves = [call.leaf for call in calls]
    try:
        gradients = torch.autograd.grad(
            output.tensor, leaves, u, retain_graph=keep, allow_unused=True
        )
    except RuntimeError as error:
        raise GradientError(
            f"the run cannot be differentiated ({error}): foretell a run without in-place changes "
            "of its cache, such as a forward pass over a text"
        ) from error
    found: dict[Place, Tensor] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is None:  # the output does not depend on this call
            continue
        products = [(gradient.float() * each.float()).sum().cpu() for each in call.errors]
        found[call.place] = found.get(call.place, 0) + torch.stack(products) / output.scale
    return found


@contextlib.contextmanager
def _without_gradients() -> Iterator[None]:
    """Disable gradients, also where `torch.no_grad()` has no effect."""
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)
