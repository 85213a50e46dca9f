"""Finds out whether gradients pass through a kernel, before the kernel runs in a training step.

A kernel without a backward pass would cut the graph: the output has no gradient, or the gradients
of some of its inputs are missing. The model would then train without an error, and wrongly.

The backward of a kernel's own `torch.autograd.Function` may call attention again, for example to
compute the probabilities again. Such calls belong to the kernel, so its nodes are marked.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from capture.hooks.modes import outside_of_modes
from replay.kernels.failures import classify

_MARK = "attention_replay_kernel"
"""Key of a kernel's node in the node's metadata."""


def needed_gradients(tensors: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the tensors whose gradients a call must pass on."""
    return tuple(
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.requires_grad
    )


def no_backward(attention: Callable[..., Tensor], keywords: Mapping[str, Any]) -> str | None:
    """Run a kernel forward and backward on a call; return why gradients do not pass, or None.

    The values of the gradients are not judged (`replay.accuracy.gradient_verdict`). Nothing reaches
    the model's own graph, hooks or random numbers.

    Args:
        keywords: the kernel's arguments; some tensors require gradients.
    """
    needed = needed_gradients(keywords)
    leaves = {name: keywords[name].detach().requires_grad_() for name in needed}
    with _apart(keywords["query"].device):
        try:
            output = attention(**{**keywords, **leaves})
            if not (isinstance(output, Tensor) and output.requires_grad):
                return "has no backward pass, but gradients are needed"
            mark_backward(output, leaves.values())
            found = torch.autograd.grad(
                output, list(leaves.values()), torch.ones_like(output), allow_unused=True
            )
        except NotImplementedError as error:
            return classify(error).reason
        except Exception as error:
            return f"gradients are needed, but its backward pass fails: {classify(error).reason}"
    missing = [name for name, each in zip(needed, found, strict=True) if each is None]
    return f"its backward returns no gradient of {', '.join(missing)}" if missing else None


def mark_backward(output: Tensor, inputs: Iterable[Tensor]) -> None:
    """Mark the nodes between a kernel's output and its inputs that run code in Python."""
    ends = {each.grad_fn for each in inputs}
    left = [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in ends:
            continue
        if isinstance(node, BackwardCFunction):
            node.metadata[_MARK] = True
        left += [each for each, _ in node.next_functions]


def in_kernel_backward() -> bool:
    """Return True inside the backward of a kernel's own function.

    Checkpoints compute a block again when such a function reads its saved tensors. Calls of that
    block are the model's.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or _MARK not in node.metadata:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        if frame.f_code.co_filename == checkpoint.__file__:
            return False
        frame = frame.f_back
    return True


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Keep work out of checkpoints, which count saved tensors and operations, and random states."""
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
        outside_of_modes(),
    ):
        yield


def _same(saved: Any) -> Any:
    return saved
