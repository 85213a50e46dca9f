"""Recognises attention modules by the names of their classes."""

from __future__ import annotations

import re

import torch
from torch import nn


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, also if TorchScript compiled it."""
    return str(getattr(module, "original_name", type(module).__name__))


def is_attention(module: nn.Module) -> bool:
    """Return whether the class or the TorchScript code of a module computes attention."""
    if isinstance(module, torch.jit.ScriptModule):
        return script_attends(module)
    name = class_name(module)
    return re.search("Attention|Attn", name) is not None and _PARTS.search(name) is None


_PARTS = re.compile(
    r"(Processor|Norm|Bias|Mask|Output|Embeddings?|Cache|Proj|Projection|Gate)\d*$"
    r"|(Down|Mid|Up)Block"
)
"""Names of helper classes, and of blocks around attention modules, which are not attention."""


def script_attends(module: nn.Module) -> bool:
    """Return whether a module's TorchScript calls attention."""
    try:
        return "scaled_dot_product_attention" in str(module.inlined_graph)
    except (RuntimeError, AttributeError):  # a container without a forward
        return False
