"""Draws random weights of any size directly on the device that uses them."""

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

    Norm scales are 1 and biases are 0. All other parameters are normal with a standard deviation of
    1/√(fan-in), which keeps activations near unit size and thus finite in half precision at any
    depth. Buffers keep the values and dtypes from their constructors, because rotary frequencies
    would be wrong in half precision.

    Args:
        construct: Function that constructs the model. During the call, parameters are on the meta
            device, so that they need neither memory nor time for an initialisation.
    """
    with init_empty_weights(include_buffers=False):
        model = construct()
    _draw_parameters(model, seed=seed, dtype=dtype, device=device)
    return model.to(device).eval()  # moves the buffers; parameters are already on the device


def redraw(models: Iterable[nn.Module], *, seed: int) -> None:
    """Replace the models' weights with random weights as in `build_random`.

    Each model has its own seed.
    """
    for stream, model in enumerate(models):
        first = next(model.parameters())
        _draw_parameters(model, seed=seed + stream, dtype=first.dtype, device=first.device)


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
        model.tie_weights()  # tied weights were drawn separately above
