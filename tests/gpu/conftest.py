"""Tests in several processes share one GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Return cached memory after each test: fifteen processes together would keep all of 80 GB, so
    that some tests would fail."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
