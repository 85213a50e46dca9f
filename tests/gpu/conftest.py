"""Fixtures for tests that need a GPU; tests in several processes share the GPU's memory."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Free cached memory after each test, because fifteen processes would otherwise keep all 80 GB
    and some tests would fail."""
    yield
    torch.cuda.empty_cache()
