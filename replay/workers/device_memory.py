"""The GPU memory that one process returns, so that other processes can use it."""

from __future__ import annotations

import torch

KEPT_SHARE = 1 / 16
"""Share of the device's free memory that a process may keep for later use. If it kept nothing, each
judged output would take milliseconds longer, to allocate and free gigabytes."""


def give_back(device: torch.device) -> None:
    """Free this process's unused GPU memory, unless the amount is small."""
    if device.type != "cuda":
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    if unused > KEPT_SHARE * free:
        torch.cuda.empty_cache()
