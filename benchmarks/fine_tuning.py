"""Fine-tunes the trained built-in Llama with each kernel, and draws the loss curves.

    python -m benchmarks.fine_tuning [--out report.html] [--kernels NAMES] [--rounds 1]
    python -m benchmarks.fine_tuning --model long_llama --kernels triton-attention,torch-cudnn

Every kernel trains the same weights on the same data, beside the model's own attention. The
gradients of some calls are recorded first, and judged. `long_llama` keeps a GPU busy, so that
predicted and measured times of its training steps should agree. Both functions are also examples of
runs that train: `capture --model benchmarks/fine_tuning.py:llama --backward --out DIR`.
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
LONG, VOCABULARY = 16384, 2048
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
    return model, _training(model, ids[:usable].view(-1, SEQUENCES, TOKENS), steps)


def long_llama(
    seed: int, device: torch.device, dtype: torch.dtype, steps: int = 4
) -> tuple[nn.Module, Callable[[], Any]]:
    """Return four layers as wide as Llama-3-8b's with random weights, and a run of some steps, each
    on another sequence of 16,384 random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONG,
    )
    with device:
        model = LlamaForCausalLM(config).to(dtype)
        batches = torch.randint(VOCABULARY, (steps, 1, LONG))
    return model, _training(model, batches, steps)


def _training(model: nn.Module, batches: torch.Tensor, steps: int) -> Callable[[], Any]:
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

    return run


def main() -> None:
    from attention_replay import judge_gradients, load

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("llama", "long_llama"), default="llama")
    parser.add_argument("--out", metavar="FILE", help="report with the loss curves")
    parser.add_argument("--kernels", default="torch-math,torch-flash")
    parser.add_argument("--rounds", default="1", help="runs with each kernel")
    arguments = parser.parse_args()
    options = ["--kernels", arguments.kernels, "--model-rounds", arguments.rounds]
    if arguments.out:
        options += ["--report", arguments.out]
    with tempfile.TemporaryDirectory() as directory:
        recorded = f"{directory}/recorded"
        model = f"{__file__}:{arguments.model}"
        _run("capture", "--model", model, "--backward", "--max", "4", "--out", recorded)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for call in (entry.load(device) for entry in load(recorded).entries):
            print(f"{call.origin.module}\n{judge_gradients(call)}")
        _run("replay", "verify", "--dir", recorded, "--trust-code", "--backward", *options)


def _run(package: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", package, *arguments], check=True)


if __name__ == "__main__":
    main()
