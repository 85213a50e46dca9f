"""Hides our own tensor work from the modes that the program has entered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Switch off every mode of this thread, and PyTorch's hooks for subclasses, until the exit.

    Modes act on every operation. For example, selective activation checkpointing counts operations
    to match a recomputation with the forward pass, and `with torch.device(…)` places new tensors.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
