"""Kernels that are visible in the output, and a compiler reset between tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replay import register_kernel
from replay.kernels import registry


def _counters() -> Any:
    from torch._dynamo.utils import counters  # imported after TRITON_INTERPRET is set

    return counters


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    _counters().clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """Return the number of different graphs compiled in this test."""
    return int(_counters()["stats"]["unique_graphs"])


@pytest.fixture
def doubling() -> Iterator[str]:
    """Register a kernel that returns twice the right output and takes no mask."""

    @register_kernel(
        "doubling", unsupported=lambda call: "no mask" if call.attn_mask is not None else None
    )
    def double(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attention: Tensor = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return 2 * attention

    yield "doubling"
    del registry._kernels["doubling"]


@pytest.fixture
def eightfold() -> Iterator[str]:
    """Register a kernel that returns eight times the right output, with a mask too."""

    @register_kernel("eightfold")
    def eightfold(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attention: Tensor = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return 8 * attention

    yield "eightfold"
    del registry._kernels["eightfold"]
