"""Tests in several processes share one GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """PyTorch keeps what a test has freed for the next one of its process: fifteen of them kept
    all of 80 GB, and some of the tests found none left."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
