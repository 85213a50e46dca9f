"""Type of device that a plan is made for, because times on one GPU say little about another."""

from __future__ import annotations

from collections.abc import Collection

import torch

from replay.rows.row import Machine
from replay.timing.machine import device_name

CPU = "cpu"
"""Type of device that stands for every processor."""


def measured_on(machine: Machine) -> str:
    """Return the type of device that a row comes from: a GPU's name, `cpu`, or empty if unknown."""
    return CPU if machine.threads else machine.device


def type_of(device: torch.device) -> str:
    """Return the type of a device: a GPU's name, or `cpu`."""
    return CPU if device.type == CPU else device_name(device)


def types_at_hand(devices: Collection[torch.device]) -> list[str]:
    """Return the types that a model with weights on these devices may run on.

    Weights on the CPU may be offloaded until they are needed on the GPU.
    """
    gpus = {type_of(device) for device in devices if device.type == "cuda"}
    if gpus:
        return sorted(gpus)
    return [CPU, *([type_of(torch.device("cuda"))] if torch.cuda.is_available() else [])]


def mismatch(device: str, at_hand: Collection[str]) -> str:
    """Describe a mismatch of plan and device; return an empty string without a known mismatch."""
    if not device or device in at_hand:
        return ""
    return f"was made on {device}, and this is {' or '.join(at_hand)}"
