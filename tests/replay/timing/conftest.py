"""In these tests, which are about timing, samples have their normal length."""

import pytest


@pytest.fixture(autouse=True)
def short_samples() -> None:
    """Keep samples at their normal length by overriding the fixture that shortens them."""
