"""Run of a model with gradients, which meet the errors of kernels at every attention call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from capture.hooks.entry_points import follow_entry_points
from capture.hooks.interceptor import Arguments, intercept
from capture.hooks.modules import ModuleTracker
from capture.hooks.phases import in_backward
from replay.kernels.registry import Kernel
from replay.patch.call_counts import CallCounts, Swap
from replay.patch.call_dispatcher import CallDispatcher
from replay.patch.planned_modules import key_length
from replay.sketches.final_output import DecodedLatents, FinalOutput, final_output
from replay.sketches.gradients_on import GradientError, check_gradients, gradients_on
from replay.sketches.recomputed import recomputed
from replay.sketches.sketch import Place

Sdpa = Callable[..., Tensor]


class _Errors(torch.autograd.Function):
    """Identity of an attention call's output that passes the gradient on to `receive`.

    The call's tensors are saved as those of any function, so that they may be recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, own: Tensor, receive: Callable[..., None], *tensors: Tensor
    ) -> Tensor:
        ctx.receive = receive
        ctx.save_for_backward(own, *tensors)
        return own.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own, *tensors = ctx.saved_tensors  # once, because checkpoints allow no more
        ctx.receive(*gradients, own, *tensors)
        return (None, *gradients, None, *(None for _ in tensors))


class TracedRun:
    """Run whose output can be differentiated; the errors of kernels are computed on the way back.

    Attributes:
        output: final output of the run.
        result: object that the run returned.
    """

    output: FinalOutput
    result: Any

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._dispatchers = [_dispatcher(kernel) for kernel in kernels]
        self._start = torch.zeros((), requires_grad=True)
        """Input of every call, so that its gradient needs those of all calls."""
        self._places: dict[Place, None] = {}
        self._products: dict[Place, Tensor] = {}
        self._squares: dict[Place, Tensor] = {}
        self._energies: dict[Place, Tensor] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._places)

    def scores(self, u: Tensor, *, keep: bool) -> dict[Place, Tensor]:
        """Return ⟨u, J ε⟩ over the output's scale, (kernels, heads), by place.

        Args:
            u: direction, of the output's shape.
            keep: True to keep the graph for another direction.
        """
        self._products.clear()
        try:
            torch.autograd.grad(
                self.output.tensor, self._start, u, retain_graph=keep, allow_unused=True
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise GradientError(
                f"the run cannot be differentiated ({error}): foretell a run without in-place "
                "changes of its cache, such as a forward pass over a text"
            ) from error
        return {
            place: self._products[place].cpu() / self.output.scale
            for place in self._places
            if place in self._products  # the output depends on these calls
        }

    def local(self) -> dict[Place, Tensor]:
        """Return the squared relative error of the outputs, (kernels, heads), by place.

        The error of a head is relative to the output of all heads.
        """
        return {
            place: (each / self._energies[place].clamp(min=1e-30)).float().cpu()
            for place, each in self._squares.items()
        }

    def followed(self, arguments: Arguments, own: Tensor, sdpa: Sdpa, place: Place) -> Tensor:
        """Return a call's output, whose gradient will meet the errors of the kernels."""
        if not in_backward():
            self._places[place] = None
        tensors = {
            name: each for name, each in arguments._asdict().items() if isinstance(each, Tensor)
        }
        receive = functools.partial(self._receive, place, arguments, tuple(tensors), sdpa)
        output: Tensor = _Errors.apply(self._start, own, receive, *tensors.values())
        return output

    def _receive(
        self,
        place: Place,
        arguments: Arguments,
        names: Sequence[str],
        sdpa: Sdpa,
        gradient: Tensor,
        own: Tensor,
        *tensors: Tensor,
    ) -> None:
        """Add the products of the gradient and the errors of a call, in a backward pass."""
        given: Any = {name: each.detach() for name, each in zip(names, tensors, strict=True)}
        arguments, own = arguments._replace(**given), own.detach()
        products, squares = [], []
        for dispatcher in self._dispatchers:
            error = (dispatcher.handle(arguments, lambda: own, sdpa) - own).float()
            products.append((gradient.float() * error).sum(dim=(0, 2, 3)))
            squares.append(error.square().sum(dim=(0, 2, 3)))
        for total, added in (
            (self._products, torch.stack(products)),
            (self._squares, torch.stack(squares)),
            (self._energies, own.float().square().sum()),
        ):
            total[place] = total[place] + added if place in total else added


@contextlib.contextmanager
def traced(
    roots: Mapping[str, nn.Module],
    run: Callable[[], Any],
    kernels: Sequence[Kernel],
    pipeline: Any = None,
    *,
    recompute: bool = False,
) -> Iterator[TracedRun]:
    """Run a model once with gradients. Backward passes are possible inside the block.

    Args:
        recompute: keep no activations of denoisers, and compute them again in backward passes.

    Raises:
        GradientError: the run has no gradients, or no output whose error can be foretold.
    """
    tracker, decoded = ModuleTracker(roots, pipeline), DecodedLatents()
    found = TracedRun(kernels)

    def handle(arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Sdpa) -> Tensor:
        check_gradients()
        own = proceed()
        if not torch.is_grad_enabled() or not isinstance(own, Tensor):
            return own  # in the decoder of latents, or inside a kernel
        site = tracker.site
        place = Place(site.module, site.phase, key_length(arguments), site.step)
        return found.followed(arguments, own, sdpa, place)

    with (
        gradients_on(roots),
        decoded.kept(roots),
        recomputed(roots) if recompute else contextlib.nullcontext(),
        tracker.watch(),
        intercept(handle),
        follow_entry_points(handle),
    ):
        try:
            found.result = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise GradientError(
                f"the run fails with gradients ({error}): let it return tensors instead of numpy "
                "arrays, and change no tensor in place"
            ) from error
        found.output = final_output(found.result, decoded.latest)
        if not found.has_calls:
            raise GradientError(
                "the run made no attention call that can be followed: there is nothing to foretell"
            )
        if not found.output.tensor.requires_grad:
            raise GradientError(
                "the run's output has no gradients: return tensors that were not detached, such as "
                "latents or logits"
            )
        yield found


def _dispatcher(kernel: Kernel) -> CallDispatcher:
    kernel = kernel.loaded()
    swap = Swap({kernel.name: CallCounts()})
    return CallDispatcher(
        swap, {kernel.name: kernel}, lambda arguments: kernel.name, contextlib.nullcontext
    )
