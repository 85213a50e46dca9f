"""Keeps our own tensor work from the modes that the program has entered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leave every mode of this thread until the exit, and PyTorch's hooks for subclasses.

    Modes act on what they see: selective activation checkpointing takes the n-th product of a
    recomputation for the n-th of the forward pass, and `with torch.device(…)` places new tensors.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
