"""The manifest describes the run that was recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import load, record
from capture.errors import CaptureError
from capture.storage.names import MANIFEST
from tests.factories import tiny_llama


def test_weights_without_a_name_are_not_stated(tmp_path: Path) -> None:
    model = tiny_llama()
    with record(model, tmp_path / "a"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "a").captures[0].weights == "not stated"
    model.name_or_path = "org/model"
    with record(model, tmp_path / "b"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "b").captures[0].weights == "org/model (its name_or_path)"


def test_settings_are_kept(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    settings = {"prompt": "a panda", "steps": 2, "size": None}
    with record(layers, tmp_path, settings=settings):
        layers(states)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["captures"][0]["settings"] == settings


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 10**30}, "`rank=` is 1000000"),
        ({"seed": 2**70}, "`seed=` is 11805"),
        ({"weights": Path("weights")}, "`weights=` is PosixPath"),
        ({"settings": {"a": float("-inf")}}, "`settings=` cannot be written as JSON"),
    ],
)
def test_description_that_cannot_be_read_back_is_refused(
    options: dict[str, Any], told: str, layers: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=told), record(layers, tmp_path / "out", **options):
        pass
    assert not (tmp_path / "out").exists()
