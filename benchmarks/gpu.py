"""The GPU that most benchmarks need."""

from __future__ import annotations

import torch


def gpu() -> torch.device:
    """Return PyTorch's current GPU.

    Raises:
        SystemExit: no GPU was found.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and PyTorch finds none here")
    return torch.device("cuda")
