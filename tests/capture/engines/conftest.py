"""The stand-in for vLLM in the place of vLLM's modules."""

import sys

import pytest

from tests.capture.engines import engine_stand_in
from tests.capture.hooks.entry_points import vllm_stand_in


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", vllm_stand_in)
    for name in ("vllm", "vllm.distributed", "vllm.v1.worker.worker_base"):
        monkeypatch.setitem(sys.modules, name, engine_stand_in)
