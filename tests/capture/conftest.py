"""A small model, random calls, and the command line in this process or another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import capture
from capture.call.attention_call import AttentionCall, Origin
from tests.in_this_process import RunCli, runner

REPOSITORY = Path(capture.__file__).resolve().parent.parent

HEADS, HEAD_DIM, WIDTH, LENGTH = 2, 8, 16, 5


class Attention(nn.Module):
    """Self-attention over (B, S, 16); query, key and value are views of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, _ = states.shape
        split = self.qkv(states).view(batch, length, 3, HEADS, HEAD_DIM).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in split)
        output = F.scaled_dot_product_attention(query, key, value)
        return output.transpose(1, 2).reshape(batch, length, WIDTH)


class Layers(nn.Module):
    """Model of layers `layers.0`, `layers.1`, …; each layer makes one attention call."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(count))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + layer(states)
        return states


@pytest.fixture
def make_layers() -> Callable[..., nn.Module]:
    """`make_layers(count)` returns a model with `count` attention layers."""

    def make(count: int = 2) -> nn.Module:
        torch.manual_seed(0)
        return Layers(count).eval()

    return make


@pytest.fixture
def layers(make_layers: Callable[..., nn.Module]) -> nn.Module:
    return make_layers()


@pytest.fixture
def states() -> Tensor:
    """Input of `layers`, a tensor (1, 5, 16)."""
    return torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make_call() -> Callable[..., AttentionCall]:
    """`make_call(call_index=3, …)` returns a random call; keywords replace its fields."""

    def make(*, model: str = "model", call_index: int = 0, **fields: Any) -> AttentionCall:
        query, key, value, output = torch.randn(4, 1, HEADS, LENGTH, HEAD_DIM)
        origin = Origin(model=model, module="attention", call_index=call_index)
        tensors = {"query": query, "key": key, "value": value, "output": output}
        return AttentionCall(**{**tensors, "origin": origin, **fields})

    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the user's cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """`start_python(*arguments, cwd=…)` starts Python, which can import this checkout."""

    def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> RunCli:
    """`run_cli("show", "x")` runs the command in this process; returns exit code, stdout,
    stderr."""
    from capture.cli.main import main

    return runner(main, capsys)
