"""The device that `--device` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture.large_imports import import_for_good
from replay.cli.files import UsageError

if TYPE_CHECKING:
    import torch


def device_of(name: str | None) -> torch.device:
    """The device of that name: by default the GPU where there is one.

    Raises:
        UsageError: there is no such device, or no kernel runs on it.
    """
    import_for_good("torch")
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {name}: write, e.g., cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: PyTorch finds no CUDA device, use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cpu" and device.index is not None:
        raise UsageError(f"--device {name}: there is one, write --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: PyTorch finds {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return device
