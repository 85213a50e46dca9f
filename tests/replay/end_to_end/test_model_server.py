"""The model's process keeps the counts and the outputs of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models import Runnable
from models.outputs import of_anything
from replay.end_to_end import model_server
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
