"""Fixtures for the tests of third-party kernels.

None of the libraries can run without a GPU. The tests replace them by **stand-ins**: modules with
the real functions' names, parameters, layouts and habits, but torch's arithmetic. The tests show
that an adapter passes the right arguments, but nothing about the libraries.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.kernels import libraries
from replay.kernels.adapters import hub, torch_activated, torch_varlen, transformer_engine
from replay.kernels.registry import catalogue


def textbook(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    top_left: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """BHSD attention in float32, returned in the query's dtype.

    Causal and windows are aligned bottom right; a side of a window that is -1 or None has no limit.
    """
    query_, key, value = query.float(), key.float(), value.float()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query_ @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.where(mask, -torch.inf)
    if causal:
        rows, columns = scores.shape[-2:]
        diagonal = 0 if top_left else columns - rows
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)
        scores = scores.where(seen, -torch.inf)
    before, after = window
    rows, columns = scores.shape[-2:]
    for i in range(rows):
        beside = i + columns - rows
        if before not in (-1, None):
            scores[..., i, : max(beside - before, 0)] = -torch.inf
        if after not in (-1, None):
            scores[..., i, max(beside + after + 1, 0) :] = -torch.inf
    if sink is not None:  # a key whose value is 0
        of_head = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([of_head, scores], dim=-1)
        value = torch.cat([torch.zeros_like(value[:, :, :1]), value], dim=2)
    return (scores.softmax(-1).nan_to_num() @ value).to(query.dtype)


@pytest.fixture
def formula() -> Callable[..., Tensor]:
    """The function `textbook`, for stand-ins."""
    return textbook


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, because the tensors are too small for a second thread to help."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear what adapters keep between calls: imports, trials, a chosen backend."""

    def clear() -> None:
        libraries._import.cache_clear()
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

    Parents of a dotted name are installed too. None as the version of a package removes it.
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
    """`gpu(9, 0)` simulates a device of that compute capability; it cannot run kernels."""

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
