"""What the manifest says about a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from capture import load, record
from capture.storage.names import MANIFEST
from tests.factories import tiny_llama


def test_the_weights_are_not_claimed_to_be_what_nobody_said(tmp_path: Path) -> None:
    model = tiny_llama()
    with record(model, tmp_path / "a"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "a").captures[0].weights == "not stated"
    model.name_or_path = "somebody/model"
    with record(model, tmp_path / "b"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "b").captures[0].weights == "somebody/model (its name_or_path)"


def test_settings_are_kept(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    settings = {"prompt": "a panda", "steps": 2, "size": None}
    with record(layers, tmp_path, settings=settings):
        layers(states)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["captures"][0]["settings"] == settings
