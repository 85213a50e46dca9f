"""The memory of a GPU that several processes use in turn."""

from __future__ import annotations

import torch

KEPT_SHARE = 1 / 16
"""Share of the device's free memory that a process may keep for later use. To free and allocate
gigabytes again would take milliseconds for every judged output."""


def give_back(device: torch.device) -> None:
    """Free this process's unused GPU memory, unless it is little."""
    if device.type != "cuda":
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    if unused > KEPT_SHARE * free:
        torch.cuda.empty_cache()
