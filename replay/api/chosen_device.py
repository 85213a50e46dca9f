"""Choice of the device: the one that the user names, or else the one that is present."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.large_imports import import_large

if TYPE_CHECKING:
    import torch


class ChoiceError(Error):
    """Reason why a choice cannot be used; the message gives the remedy."""


def check_name(name: str | None) -> None:
    """Raise ChoiceError for an invalid device name; import torch only if the name seems wrong."""
    if name and not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        device_of(name)


def device_of(name: str | None) -> torch.device:
    """Return the named device; without a name, return the GPU if there is one, else the CPU.

    Raises:
        ChoiceError: there is no such device, or no kernel runs on it.
    """
    import_large("torch")
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ChoiceError(f"--device {name}: write, e.g., cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ChoiceError(f"--device {name}: PyTorch finds no CUDA device, use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ChoiceError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cpu" and device.index is not None:
        raise ChoiceError(f"--device {name}: there is one, write --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ChoiceError(
            f"--device {name}: PyTorch finds {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return device
