"""Predictions for a model changed by users of diffusers: every call is counted and replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture.cli.main import main as capture
from replay.cli.main import main as replay

MODEL = """
import torch
from tests.replay.patch.test_as_used import CHANGES, model, step

def build():
    denoiser = model()
    torch.manual_seed(1)
    CHANGES["compiled blocks"](denoiser)

    def run():
        with torch.no_grad():
            return torch.cat([step(denoiser) for _ in range(3)])

    return denoiser, run
"""
KERNEL = """
import time
from torch.nn.functional import scaled_dot_product_attention as sdpa

def slow(*args, **kwargs):
    time.sleep(0.1)
    return sdpa(*args, **kwargs)
"""
CALLS = 6


@pytest.mark.slow
def test_a_changed_model_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # for the model's process
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("kernels.py").write_text(KERNEL)
    with pytest.raises(SystemExit) as ended:
        capture(["--model", "model.py:build", "--max", "2", "--out", "recorded"])
    assert ended.value.code == 0
    arguments = ["verify", "--dir", "recorded", "--trust-code", "--device", "cpu", "--rounds", "3"]
    arguments += ["--model-rounds", "3", "--kernels", "kernels.py:slow", "--checks", "told.jsonl"]
    with pytest.raises(SystemExit) as ended:
        replay(arguments)
    assert ended.value.code == 0
    own, slow = (json.loads(line) for line in Path("told.jsonl").read_text().splitlines())
    assert own["status"] == slow["status"] == "ok"
    assert (own["hits"], own["own_calls"]) == (0, CALLS)
    assert (slow["hits"], slow["own_calls"], slow["fallbacks"]) == (CALLS, 0, {})
    assert slow["drift"]["relative_l1"] == 0
    # The kernel is so slow that everything else is negligible.
    predicted = slow["prediction"]["run"]["new_seconds"]["value"]
    assert predicted == pytest.approx(slow["measured"]["run"]["ms"]["p50"] / 1000, rel=0.25)
