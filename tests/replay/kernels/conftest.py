"""Fixtures for the tests of third-party kernels.

None of the libraries can run without a GPU, so the tests replace them by **stand-ins**: modules
with the real functions' names, parameters, layouts and habits, but torch's arithmetic
(`stand_ins.py`). The tests show only that an adapter passes the right arguments.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from replay.kernels import libraries
from replay.kernels.adapters import hub, torch_activated, torch_varlen, transformer_engine
from replay.kernels.registry import catalogue


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, because a second thread does not help with such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear what adapters keep between calls: imports, trials, a chosen backend."""

    def clear() -> None:
        libraries._import.cache_clear()
        libraries.imported.cache_clear()
        hub._fetch.cache_clear()
        torch_activated._trial.cache_clear()
        torch_varlen._parameters.cache_clear()
        transformer_engine._module.cache_clear()
        transformer_engine._chosen = None

    clear()
    yield
    clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`install("flash_attn", version=…, flash_attn_func=…)` adds a module until the test ends.

    Parents of a dotted name are installed too. A package is removed if its version is None.
    """
    versions: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(package: str) -> str:
        found = versions[package] if package in versions else real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)

    def put(name: str, version: tuple[str, str | None] | None = None, **members: Any) -> ModuleType:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules or length == len(parts):
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        module = sys.modules[name]
        module.__file__ = "stand-in"
        for member, value in members.items():
            setattr(module, member, value)
        if version is not None:
            versions[version[0]] = version[1]
        libraries._import.cache_clear()
        return module

    return put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], torch.device]:
    """`gpu(9, 0)` simulates a device of that compute capability, which cannot run kernels."""

    def make(major: int, minor: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        return torch.device("cuda")

    return make


@pytest.fixture
def unavailable(gpu: Callable[[int, int], torch.device]) -> Callable[..., str | None]:
    """`unavailable("fa3", 8, 6)` returns the kernel's reason on a GPU of that capability."""

    def ask(name: str, major: int = 9, minor: int = 0) -> str | None:
        return catalogue()[name].unavailable(gpu(major, minor))

    return ask
