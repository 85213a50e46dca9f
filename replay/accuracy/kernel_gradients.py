"""Runs a kernel forward and backward on a recorded call, several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.gradients import GRADIENTS
from replay.kernels.failures import classify
from replay.kernels.registry import find

RUNS = 3
"""Number of runs on the same call, whose gradients should have the same bits."""

KernelFunction = Callable[..., Tensor]
"""Function with SDPA's arguments, such as a kernel's `attention`."""


class GradientError(Error, ValueError):
    """Gradients that cannot be judged; the message says why."""


def earlier_call(call: AttentionCall) -> AttentionCall:
    """Return the call with its keys in reverse order, which a kernel runs before the call itself.

    A kernel that keeps keys of an earlier call then uses the wrong ones.
    """
    return replace(call, key=call.key.flip(2))


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
    tensors = call.without_gradients().tensors()
    recorded = [
        name for name in ("attn_mask", "sinks") if getattr(call, GRADIENTS[name]) is not None
    ]
    names = ["query", "key", "value", *recorded]
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    try:
        with torch.enable_grad():
            output = kernel(**{**call.arguments(), **leaves})
        if not output.requires_grad:
            raise GradientError(
                "the kernel has no backward pass: its output does not require gradients"
            )
        found = torch.autograd.grad(
            output, list(leaves.values()), call.grad_output, allow_unused=True
        )
    except Error:
        raise
    except Exception as error:
        raise GradientError(f"the kernel cannot run this call: {classify(error).reason}") from error
    gradients = {name: each for name, each in zip(leaves, found, strict=True) if each is not None}
    if missing := ", ".join(name for name in names if name not in gradients):
        raise GradientError(f"the kernel's backward returns no gradient of {missing}")
    return gradients
