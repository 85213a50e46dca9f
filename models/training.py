"""Follows the training steps of a run and undoes them, so that each run trains the same weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import ModelError
from .outputs import Outputs

FIRST_GRADIENT = "first gradient of "
SAMPLED = 256
"""Number of elements, or twice as many, that are kept of a larger gradient."""


@dataclass(frozen=True)
class Trained:
    """Result of a run that trained.

    Attributes:
        result: Result of the user's function.
        steps: Training steps of the run.
    """

    result: Any
    steps: Steps

    def outputs(self) -> Outputs:
        """Return ``loss`` and ``grad_norm``, each with one element per step, and a sample of each
        parameter's first gradient.

        Raises:
            ModelError: The function did not return its loss.
        """
        result = self.result
        found = result if isinstance(result, Mapping) else {"loss": result}
        norms = found.get("grad_norm", [square.sqrt() for square in self.steps.squares])
        tensors = {"loss": _numbers(found.get("loss")), "grad_norm": _numbers(norms)}
        if tensors["loss"].numel() == 0:
            raise ModelError(
                "a run that trains must return its loss: a number, a number for each step, or a "
                f"mapping with loss and, optionally, grad_norm; it returned {type(result).__name__}"
            )
        first = {f"{FIRST_GRADIENT}{name}": each for name, each in self.steps.first.items()}
        return Outputs("training", tensors | {name: each.cpu() for name, each in first.items()})


class Training:
    """Training steps of a model's runs.

    The weights and the states of optimisers from ``torch.optim`` are put back after each run. The
    first step of the first run copies the weights that are trained; the copy stays in memory.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._names = {
            parameter: ".".join(filter(None, (root, name)))
            for root, module in roots.items()
            for name, parameter in module.named_parameters()
        }
        self._start: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def undone(self) -> Iterator[Steps]:
        """Undo all training steps at the end; yield what is known of them then."""
        steps = Steps(self._start, self._names)
        hook = register_optimizer_step_pre_hook(steps.begin)
        try:
            yield steps
            if not steps.squares and any(each.grad is not None for each in self._names):
                steps.squares.append(steps.square(self._names, is_first=True))
        finally:
            hook.remove()
            steps.undo()
            for parameter in self._names:
                parameter.grad = None


@dataclass
class Steps:
    """Training steps of a run.

    Attributes:
        squares: Sum of the squared gradients (0-dim) in each step, as the optimisers received them;
            without an optimiser, of those at the end of the run.
        first: Sample of each parameter's first gradient, when the weights are those of any other
            run, by the parameter's name; scaled to the norm that the whole gradient probably has.
    """

    start: dict[nn.Parameter, Tensor]
    names: Mapping[nn.Parameter, str]
    squares: list[Tensor] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)
    _states: dict[Optimizer, dict[str, Any]] = field(default_factory=dict)
    _stepped: set[Optimizer] = field(default_factory=set)
    """Optimisers that have made the current step."""

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the gradients, and the first time the state, of an optimiser before its step."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if is_first := optimizer not in self._states:
            self._states[optimizer] = copy.deepcopy(optimizer.state_dict())
            for each in parameters:
                if each not in self.start:
                    self.start[each] = each.detach().clone()
        square = self.square(parameters, is_first=is_first)
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self.squares.append(square)
        else:
            self.squares[-1] = self.squares[-1] + square
        self._stepped.add(optimizer)

    @torch.no_grad()
    def square(self, parameters: Iterable[nn.Parameter], *, is_first: bool) -> Tensor:
        """Return the sum of the squared gradients, 0-dim; keep samples of the first ones."""
        norms = []
        for each in parameters:
            if each.grad is None:
                continue
            norms.append(torch.linalg.vector_norm(each.grad, dtype=torch.float32))
            if is_first and each in self.names:
                elements = each.grad.flatten()
                kept = elements[:: max(len(elements) // SAMPLED, 1)].float()
                self.first[self.names[each]] = kept * math.sqrt(len(elements) / len(kept))
        return torch.stack(norms).square().sum() if norms else torch.zeros(())

    @torch.no_grad()
    def undo(self) -> None:
        for optimizer, state in self._states.items():
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.copy_(self.start[each])
            optimizer.load_state_dict(state)


def _numbers(value: Any) -> Tensor:
    """Return one or several numbers as (steps,) on the CPU; empty for anything else."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, (int, float, Tensor)) for each in values):
        return torch.empty(0)
    found = [torch.as_tensor(each).detach().to("cpu", torch.float64) for each in values]
    if any(each.ndim > 1 for each in found):
        return torch.empty(0)
    return torch.cat([each.flatten() for each in found]) if found else torch.empty(0)
