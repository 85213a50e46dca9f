"""A user's small recorded model, with kernels that are slow, wrong or crash in the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from capture.cli.main import main as capture
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from replay.cli.main import main
from tests.in_this_process import exit_code

MODEL = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.inner(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v)
        return x + out.transpose(1, 2).reshape(1, 16, 32)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x, timestep):
        for layer in self.layers:
            x = layer(x)
        return x

def build():
    model = Model()
    start = torch.randn(1, 16, 32)

    def run():
        x = start
        for step in range(4):
            x = model(x, timestep=step)
        return x

    return model, run
"""
"""Model with three layers and four denoising steps: twelve calls of 1×2×16×16."""

CALLS = 12

KERNELS = """
import os
import signal
import sys
import time

from torch.nn.functional import scaled_dot_product_attention as sdpa

def slow(*args, **kwargs):
    time.sleep(0.03)  # on a busy machine it ends in time, where a loop would lose its turn
    return sdpa(*args, **kwargs)

def wrong(*args, **kwargs):
    return sdpa(*args, **kwargs) * 1.001

def overwrites_cache(query, key, value, attn_mask=None, **options):
    key -= key.mean(dim=2, keepdim=True)  # as SageAttention 1 does; exact in itself
    return sdpa(query, key, value, attn_mask, **options)

def spares_cache(query, key, *args, **kwargs):
    return overwrites_cache(query, key.clone(), *args, **kwargs)

def _in_model():
    return "replay.end_to_end.model_server" in sys.modules

def segfaults(*args, **kwargs):
    if _in_model():
        os.kill(os.getpid(), signal.SIGSEGV)
    return sdpa(*args, **kwargs)

def hangs(*args, **kwargs):
    if _in_model():
        time.sleep(600)
    return sdpa(*args, **kwargs)

def raises(*args, **kwargs):
    if _in_model():
        raise ValueError("not today")
    return sdpa(*args, **kwargs)
"""

SLOW_SECONDS = 0.03
"""Minimum time that `slow` adds to each call."""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model.py:build`, its recording in `recorded`, and `kernels.py`."""
    place = tmp_path_factory.mktemp("workshop")
    (place / "model.py").write_text(MODEL)
    (place / "kernels.py").write_text(KERNELS)
    arguments = ["--model", f"{place}/model.py:build", "--max", "3"]
    assert exit_code(capture, *arguments, "--out", str(place / "recorded")) == 0
    return place


@pytest.fixture
def capture_record(workshop: Path) -> CaptureRecord:
    (found,) = Dataset.open(workshop / "recorded").captures
    return found


def check(workshop: Path, told: Path, kernels: str, *options: str) -> dict[str, dict[str, Any]]:
    """Return the command's `--checks` by kernel."""
    names = ",".join(f"kernels.py:{name}" for name in kernels.split(","))
    arguments = ["verify", "--dir", "recorded", "--trust-code", "--checks", str(told)]
    arguments += ["--kernels", names]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workshop)
        assert exit_code(main, *arguments, "--device", "cpu", *options) == 0
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    return {line["kernel"].partition(":")[2] or line["kernel"]: line for line in lines}
