"""Samples of normal length, because these tests are about timing."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_samples() -> None:
    """Keep samples at their normal length by overriding the fixture that shortens them."""
