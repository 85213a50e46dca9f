"""Kernels of `benchmarks.busy_machine`, which a worker of their own imports."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def again(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return PyTorch's attention."""
    return scaled_dot_product_attention(query, key, value, **options)


def twice(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return PyTorch's attention, computed twice."""
    again(query, key, value, **options)
    return again(query, key, value, **options)
