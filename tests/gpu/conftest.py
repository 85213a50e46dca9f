"""Tests in this folder need a GPU, and tests in several processes share its memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Return cached memory after each test: fifteen processes together would keep all of 80 GB, so
    that some tests would fail."""
    yield
    torch.cuda.empty_cache()
