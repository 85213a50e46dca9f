"""The GPU that most benchmarks need."""

from __future__ import annotations

import torch


def gpu() -> torch.device:
    """The one that is PyTorch's current device.

    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and PyTorch finds none here")
    return torch.device("cuda")
