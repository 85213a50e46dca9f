"""The stand-in for vLLM in the place of vLLM's modules."""

import sys

import pytest

from tests.capture.engines.engine_stand_in import MODULES


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
