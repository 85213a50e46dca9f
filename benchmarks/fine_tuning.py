"""Fine-tunes the trained built-in Llama with each kernel, and draws the loss curves.

    python -m benchmarks.fine_tuning --out report.html [--kernels NAMES] [--steps 50]

Every kernel trains the same weights on the same data, beside the model's own attention. The
gradients of some calls are recorded first, and judged. `llama` is also an example of a run that
trains: `capture --model benchmarks/fine_tuning.py:llama --backward --out DIR`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import models
from models import pretrained_weights

TOKENS, SEQUENCES = 256, 4
LEARNING_RATE = 3e-4


def llama(
    seed: int, device: torch.device, dtype: torch.dtype, steps: int = 50
) -> tuple[nn.Module, Callable[[], Any]]:
    """Return the model, and a run of some steps with AdamW, each on another batch of text."""
    name = str(dtype).removeprefix("torch.")
    runnable = models.load("llama", size="tiny", seed=seed, device=str(device), dtype=name)
    model, directory = runnable.roots[""], pretrained_weights.directory("llama")
    assert runnable.language is not None
    assert runnable.language.tokenizer is not None
    assert directory is not None
    text = (directory / "held_out.txt").read_text(encoding="utf-8")
    ids = torch.tensor(runnable.language.tokenizer(text)["input_ids"], device=device)
    usable = len(ids) - len(ids) % (SEQUENCES * TOKENS)
    batches = ids[:usable].view(-1, SEQUENCES, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    @torch.enable_grad()
    def run() -> dict[str, list[torch.Tensor]]:
        losses = []
        for step in range(steps):
            batch = batches[step % len(batches)]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return {"loss": losses}

    return model, run


def main() -> None:
    from attention_replay import judge_gradients, load

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--kernels", default="torch-math,torch-flash")
    parser.add_argument("--steps", default="50")
    arguments = parser.parse_args()
    model = ["--model", f"{__file__}:llama", "--steps", arguments.steps]
    options = ["--kernels", arguments.kernels, "--model-rounds", "1", "--report", arguments.out]
    with tempfile.TemporaryDirectory() as directory:
        recorded = f"{directory}/recorded"
        _run("capture", *model, "--backward", "--max", "4", "--out", recorded)
        for call in load(recorded):
            print(f"{call.origin.module}\n{judge_gradients(call)}")
        _run("replay", "verify", "--dir", recorded, "--trust-code", "--backward", *options)


def _run(package: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", package, *arguments], check=True)


if __name__ == "__main__":
    main()
