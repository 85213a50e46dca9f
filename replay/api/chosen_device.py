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
    """Raise ChoiceError for a name of a device that no machine has. Imports no torch."""
    if name is None or re.fullmatch("cpu|cuda(:[0-9]{1,2})?", name):
        return
    if name.startswith("cpu:"):
        raise ChoiceError(f"--device {name}: there is one, write --device cpu")
    raise ChoiceError(f"--device {name}: only cpu and cuda are supported, write, e.g., cuda:1")


def device_of(name: str | None) -> torch.device:
    """Return the named device; without a name, return the GPU if there is one, else the CPU.

    Raises:
        ChoiceError: there is no such device, or no kernel runs on it.
    """
    check_name(name)
    import_large("torch")
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ChoiceError(f"--device {name}: PyTorch finds no CUDA device, use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ChoiceError(
            f"--device {name}: PyTorch finds {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return device
