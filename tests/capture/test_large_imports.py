"""PyTorch is imported without garbage collection, which does not affect later code."""

from __future__ import annotations

import gc

import pytest

from capture.large_imports import without_collecting


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collecting_goes_on_as_before(was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        with pytest.raises(ImportError), without_collecting():
            import nosuch  # noqa: F401
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
