"""Samples as long as a user's: they are the subject."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_samples() -> None:
    """Takes the place of the one that shortens them."""
