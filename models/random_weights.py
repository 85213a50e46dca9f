"""Random weights at any size: allocated once, in place, on the device that will use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


def build_random(
    construct: Callable[[], Module], *, seed: int, dtype: torch.dtype, device: torch.device
) -> Module:
    """Construct a model with random parameters of ``dtype`` directly on ``device``, in eval mode.

    Norm scales are 1, biases 0, and all else is normal with a standard deviation of
    1/√(fan-in), which keeps activations near unit size, so that they stay finite in half
    precision at any depth. Buffers keep the values and the dtype their constructors gave them:
    rotary frequencies in half precision would be wrong.

    Args:
        construct: Makes the model; it runs with parameters on the meta device, so it takes no
            memory for them and none of the time of an initialisation that is then thrown away.
    """
    with init_empty_weights(include_buffers=False):
        model = construct()
    _draw_parameters(model, seed=seed, dtype=dtype, device=device)
    return model.to(device).eval()  # the buffers are what is left to move


def redraw(models: Iterable[nn.Module], *, seed: int) -> None:
    """Give models that have weights random ones instead, by the same rule; one stream for each."""
    for stream, model in enumerate(models):
        some = next(model.parameters())
        _draw_parameters(model, seed=seed + stream, dtype=some.dtype, device=some.device)


def _draw_parameters(
    model: nn.Module, *, seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            if parameter.ndim >= 2:
                fan_in = math.prod(parameter.shape[1:])
                values.normal_(std=fan_in**-0.5, generator=generator)
            else:
                values.fill_(0.0 if name.endswith("bias") else 1.0)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # giving each name its own values has untied them
