"""Functions whose source is copied into scripts that read a recording without this project."""

from __future__ import annotations

import torch


def restored(values, device, size, stride, order):  # type: ignore[no-untyped-def]
    """Return stored values as a tensor on `device`, with the size and strides of the model's."""
    if order:
        values = values.permute([order.index(dim) for dim in range(4)])
    sizes = [1 if step == 0 else length for length, step in zip(size, stride, strict=True)]
    last = sum(step * (length - 1) for length, step in zip(sizes, stride, strict=True))
    memory = torch.empty(last + 1 if values.numel() else 0, dtype=values.dtype, device=device)
    return memory.fill_(1).as_strided(sizes, stride).copy_(values).expand(size)
