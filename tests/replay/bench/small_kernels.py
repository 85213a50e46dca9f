"""Kernels of a few lines, and the types of the fixtures that run kernels."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from replay.kernels.registry import Kernel
from replay.rows.row import Row

Register = Callable[..., Kernel]
Replayed = Callable[..., dict[str, Row]]


def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **options)


def raising(error: BaseException) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        raise error

    return attention
