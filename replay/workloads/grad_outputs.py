"""The gradient of a call's output, from which a backward pass starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from capture.call.attention_call import AttentionCall


def with_grad_output(call: AttentionCall, seed: int) -> AttentionCall:
    """Return the call with its recorded `grad_output`, or with standard normal values.

    On one device, a seed always gives the same values, so that a judge in another process draws
    the same.
    """
    if call.grad_output is not None:
        return replace(call, grad_output=call.grad_output.to(call.dtype))
    generator = torch.Generator(call.device).manual_seed(seed)
    shape = (*call.query.shape[:3], call.value.shape[3])
    drawn = torch.randn(shape, generator=generator, device=call.device)
    return replace(call, grad_output=drawn.to(call.dtype))
