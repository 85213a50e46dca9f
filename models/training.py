"""Follows the training steps of a run and undoes them, so that each run trains the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import ModelError
from .outputs import Outputs


@dataclass(frozen=True)
class Trained:
    """Result of a run that trained.

    Attributes:
        result: Result of the user's function.
        grad_norms: L2 norm of all gradients (0-dim) in each step, as the optimiser received them;
            without an optimiser, of those at the end of the run.
    """

    result: Any
    grad_norms: list[Tensor]

    def outputs(self) -> Outputs:
        """Return ``loss`` and ``grad_norm``, each with one element per step.

        Raises:
            ModelError: The function did not return its loss.
        """
        result = self.result
        found = result if isinstance(result, Mapping) else {"loss": result}
        norms = found.get("grad_norm", self.grad_norms)
        tensors = {"loss": _numbers(found.get("loss")), "grad_norm": _numbers(norms)}
        if tensors["loss"].numel() == 0:
            raise ModelError(
                "a run that trains must return its loss: a number, a number for each step, or a "
                f"mapping with loss and, optionally, grad_norm; it returned {type(result).__name__}"
            )
        return Outputs("training", tensors)


class Training:
    """Training steps of a model's runs.

    The weights and the states of optimisers from ``torch.optim`` are put back after each run. The
    first step of the first run copies the weights that are trained; the copy stays in memory.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._parameters = list(
            dict.fromkeys(each for root in roots.values() for each in root.parameters())
        )
        self._start: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def undone(self) -> Iterator[list[Tensor]]:
        """Undo all training steps at the end; yield the list that then has their gradient norms."""
        steps, norms = _Steps(self._start), list[Tensor]()
        hook = register_optimizer_step_pre_hook(steps.begin)
        try:
            yield norms
            left = [each for each in self._parameters if each.grad is not None]
            norms += [total.sqrt() for total in steps.squares] or (
                [_square(left).sqrt()] if left else []
            )
        finally:
            hook.remove()
            steps.undo()
            for parameter in self._parameters:
                parameter.grad = None


@dataclass
class _Steps:
    start: dict[nn.Parameter, Tensor]
    squares: list[Tensor] = field(default_factory=list)
    """Sum of the squared gradients of all optimisers, in each step."""
    _states: dict[Optimizer, dict[str, Any]] = field(default_factory=dict)
    _stepped: set[Optimizer] = field(default_factory=set)
    """Optimisers that have made the current step."""

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the gradients, and the first time the state, of an optimiser before its step."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if optimizer not in self._states:
            self._states[optimizer] = copy.deepcopy(optimizer.state_dict())
            for each in parameters:
                if each not in self.start:
                    self.start[each] = each.detach().clone()
        square = _square([each for each in parameters if each.grad is not None])
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self.squares.append(square)
        else:
            self.squares[-1] = self.squares[-1] + square
        self._stepped.add(optimizer)

    @torch.no_grad()
    def undo(self) -> None:
        for optimizer, state in self._states.items():
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.copy_(self.start[each])
            optimizer.load_state_dict(state)


@torch.no_grad()
def _square(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of the squared gradients, 0-dim."""
    norms = [
        torch.linalg.vector_norm(each.grad, dtype=torch.float32)
        for each in parameters
        if each.grad is not None
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def _numbers(value: Any) -> Tensor:
    """Return one or several numbers as (steps,) on the CPU; empty for anything else."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, (int, float, Tensor)) for each in values):
        return torch.empty(0)
    found = [torch.as_tensor(each).detach().to("cpu", torch.float64) for each in values]
    if any(each.ndim > 1 for each in found):
        return torch.empty(0)
    return torch.cat([each.flatten() for each in found]) if found else torch.empty(0)
