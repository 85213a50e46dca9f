"""The model's process keeps the counts and the outputs of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import models
from models import Runnable
from models.outputs import of_anything
from replay.end_to_end import model_server
from replay.end_to_end.live_model import LiveModel
from replay.end_to_end.model_process import Variant
from replay.end_to_end.run_pace import RunPace
from replay.patch.call_counts import CallCounts, Swap


@pytest.mark.parametrize(("answered", "is_kept"), [(2, True), (0, False), (None, True)])
def test_text_without_the_kernel_is_not_kept(
    tmp_path: Path, answered: int | None, is_kept: bool
) -> None:
    swap = Swap({} if answered is None else {"for decoding": CallCounts(hits=28)})

    def score(ids: Tensor) -> Tensor:
        if answered:
            swap.kernels["for decoding"].hits += answered
        return torch.zeros(3, 5)

    language = SimpleNamespace(
        encode=lambda text: torch.zeros(1, 3, dtype=torch.long), score=score, decode=None
    )
    outputs = SimpleNamespace(tensors={"logits": torch.ones(2, 5)})
    runnable = SimpleNamespace(language=language, outputs=lambda result: outputs)
    file = tmp_path / "outputs.safetensors"
    request = {"name": "for decoding", "text": "three tokens", "keep": str(file), "save": None}
    model_server._keep(runnable, None, request, swap)
    kept = load_file(file)
    assert "logits" in kept
    assert ("text_logits" in kept) == is_kept
    assert ("text_ids" in kept) == is_kept


def test_tokens_of_an_engine_are_counted() -> None:
    def run() -> list[SimpleNamespace]:
        model(torch.ones(1, 4))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[3] * n)]) for n in (5, 2)]

    model, said = nn.Linear(4, 4), dict[str, Any]()
    runnable = Runnable("engine", {"": model}, run, of_anything, "", {})
    absent = dict.fromkeys(("kernel", "plan", "keep", "waits"))
    request = {"step": "run", "name": "own", "path": [], "drains": False, **absent}
    model_server.step(runnable, request, lambda **message: said.update(message))
    assert said["ran"]["times"]["tokens"] == {"run": 7}


TRAINS = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

def build():
    model = nn.Linear(8, 24)
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.enable_grad()
    def run():
        parts = model(torch.ones(1, 2, 5, 8)).chunk(3, -1)
        loss = scaled_dot_product_attention(*parts).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return model, run
"""
KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def triple(*args, **options):
    return scaled_dot_product_attention(*args, **options) * 3

forward_only = torch.no_grad()(triple)
"""
CUT = "has no backward pass, but gradients are needed"


def test_training_step_runs_with_each_kernel(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TRAINS)
    (tmp_path / "kernels.py").write_text(KERNELS)
    live = LiveModel(models.load(f"{tmp_path}/model.py:build"), RunPace())
    found = {}
    for kernel in (None, "triple", "forward_only"):
        name = kernel and f"{tmp_path}/kernels.py:{kernel}"
        run = live.run(Variant(str(kernel), name), keep=tmp_path / "kept")
        kept = load_file(tmp_path / "kept")
        found[kernel] = (float(kept["loss"]), float(kept["grad_norm"]), run.hits, run.fallbacks)
    loss, norm, *_ = found[None]
    assert found["triple"] == (pytest.approx(9 * loss), pytest.approx(9 * norm), 1, {})
    assert found["forward_only"] == (loss, norm, 0, {CUT: 1})
