"""Memory of a GPU that several processes use in turns."""

from __future__ import annotations

import torch

KEPT_SHARE = 1 / 16
"""Of what is free on the device, that a process may keep to use again: getting and giving back
gigabytes takes milliseconds, at every output that is judged."""


def give_back(device: torch.device) -> None:
    """Leave to other processes what this one does not use, unless that is little."""
    if device.type != "cuda":
        return
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    if unused > KEPT_SHARE * free:
        torch.cuda.empty_cache()
