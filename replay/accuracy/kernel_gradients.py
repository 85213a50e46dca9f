"""Runs a kernel forward and backward on a recorded call, several times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.gradients import GRADIENTS
from replay.kernels.failures import classify
from replay.kernels.registry import find

RUNS = 3
"""Number of runs on the same call, whose gradients should have the same bits."""

NO_BACKWARD = "has no backward"
"""Reason why a kernel is not differentiated."""

KernelFunction = Callable[..., Tensor]
"""Function with SDPA's arguments, such as a kernel's `attention`."""


class GradientError(Error, ValueError):
    """Gradients that cannot be judged; the message says why."""


def earlier_call(call: AttentionCall) -> AttentionCall:
    """Return the call with its keys in reverse order, which a kernel runs before the call itself.

    A kernel that keeps keys of an earlier call then uses the wrong ones.
    """
    return replace(call, key=call.key.flip(2))


def differentiated(
    attention: KernelFunction,
    arguments: Mapping[str, Any],
    names: Iterable[str],
    grad_output: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a kernel forward and backward.

    Args:
        names: arguments whose gradients are returned.
        grad_output: (B, Hq, Sq, Dv).

    Returns:
        The output, and copies of the gradients by name, without those of arguments that have no
        effect on the output.

    Raises:
        NotImplementedError: the kernel has no backward pass, or refuses the call.
    """
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        output = attention(**{**arguments, **leaves})
    if not output.requires_grad:
        raise NotImplementedError(NO_BACKWARD)
    found = torch.autograd.grad(output, [*leaves.values()], grad_output, allow_unused=True)
    gradients = zip(leaves, found, strict=True)
    return output.detach(), {name: each.clone() for name, each in gradients if each is not None}


def kernel_gradients(kernel: str | KernelFunction, call: AttentionCall) -> list[dict[str, Tensor]]:
    """Return the gradients of each run of a kernel on a call, by the name of their tensor.

    Gradients of a mask and of sinks are computed if the call has recorded ones.

    Raises:
        GradientError: the kernel refuses the call, fails, or returns no gradient of a tensor.
        KernelNameError: no kernel has this name.
    """
    if isinstance(kernel, str):
        known = find(kernel).loaded()
        if reason := known.refuses(call):
            raise GradientError(f"{kernel} cannot run this call: {reason}")
        kernel = known.attention
    _once(kernel, earlier_call(call))
    return [_once(kernel, call) for _ in range(RUNS)]


def _once(kernel: KernelFunction, call: AttentionCall) -> dict[str, Tensor]:
    recorded = [
        name for name in ("attn_mask", "sinks") if getattr(call, GRADIENTS[name]) is not None
    ]
    names = ["query", "key", "value", *recorded]
    try:
        _, gradients = differentiated(kernel, call.arguments(), names, call.grad_output)
    except Error:
        raise
    except Exception as error:
        raise GradientError(f"the kernel cannot run this call: {classify(error).reason}") from error
    if missing := ", ".join(name for name in names if name not in gradients):
        raise GradientError(f"the kernel's backward returns no gradient of {missing}")
    return gradients
