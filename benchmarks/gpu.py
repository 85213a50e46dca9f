"""The GPU that most benchmarks need, and the columns of their results that name the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replay.timing.machine import describe

MACHINE = ("machine.device", "machine.torch", "machine.triton")


def gpu() -> torch.device:
    """Return PyTorch's current GPU.

    Raises:
        SystemExit: no GPU was found.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and PyTorch finds none here")
    return torch.device("cuda")


def measured_on(device: torch.device, columns: Sequence[str] = MACHINE) -> dict[str, Any]:
    """Return the cells of the columns that name the machine, such as `machine.torch`."""
    machine = describe(device)
    return {name: getattr(machine, name.removeprefix("machine.")) for name in columns}
