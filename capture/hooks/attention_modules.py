"""Which modules compute attention, by their classes."""

from __future__ import annotations

import re

import torch
from torch import nn


def class_name(module: nn.Module) -> str:
    """A module's class, also of one that TorchScript compiled."""
    return str(getattr(module, "original_name", type(module).__name__))


def is_attention(module: nn.Module) -> bool:
    """Whether a module's class says that it computes attention, or its TorchScript does."""
    if isinstance(module, torch.jit.ScriptModule):
        return script_attends(module)
    name = class_name(module)
    return re.search("Attention|Attn", name) is not None and _PARTS.search(name) is None


_PARTS = re.compile(
    r"(Processor|Norm|Bias|Mask|Output|Embeddings?|Cache|Proj|Projection|Gate)\d*$"
    r"|(Down|Mid|Up)Block"
)
"""What belongs to attention and computes none; a UNet's blocks leave it to modules of theirs."""


def script_attends(module: nn.Module) -> bool:
    """Whether TorchScript's code of a module calls attention."""
    try:
        return "scaled_dot_product_attention" in str(module.inlined_graph)
    except (RuntimeError, AttributeError):  # a container without a forward
        return False
