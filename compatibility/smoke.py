"""Smoke tests, one function per step, which run in the interpreter of a tested environment.

Run `python smoke.py STEP` in a scratch directory that contains this file. Exits 0 if the step
works, and 2 if it states in one sentence what the environment lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(1, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + output.transpose(1, 2).reshape(x.shape)


def build(seed: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a user's model: three layers of self-attention in plain torch."""
    torch.manual_seed(seed)
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(1, 100, 64)

    @torch.no_grad()
    def run() -> Tensor:
        result: Tensor = model(x)
        return result

    return model, run


def record_a_user_model() -> None:
    from capture import load, record

    model, run = build(seed=0)
    with record(model, out="own", max=3):
        run()
    assert len(load("own")) == 3


def replay_the_recording() -> None:
    _command("replay", "--dir", "own", "--kernels", "torch-math,torch-flash", *_QUICK)
    _all_ok({"torch-math", "torch-flash"})


def use_kernel_and_use_plan() -> None:
    from replay import use_kernel, use_plan

    _, run = build(seed=0)
    before = run()
    with use_kernel("torch-math") as swap:
        after = run()
    assert swap.hits == 3, swap
    assert (before - after).abs().max() < 1e-4
    _command(
        *("replay", "plan", "--dir", "own", "--kernels", "torch-math,torch-flash", *_QUICK),
        *("--out", "plan.json", "--budget", "rmse=0.1"),
    )
    with use_plan("plan.json") as planned:
        run()
    assert planned.hits == 3, planned


def capture_a_function() -> None:
    _command("capture", "--model", "smoke.py:build", "--max", "3", "--out", "function")


def capture_a_transformers_checkpoint() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("language")
    _command("capture", "--model", "language", "--max", "4", "--steps", "2", "--out", "checkpoint")
    _command("capture", "check", "checkpoint")


def capture_a_diffusers_checkpoint() -> None:
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) + end for code in range(97, 123) for end in ("", "</w>")]
    words = [*letters, "<|startoftext|>", "<|endoftext|>"]
    Path("tokenizer").mkdir(exist_ok=True)
    Path("tokenizer/vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    Path("tokenizer/merges.txt").write_text("#version: 0.2\n")
    text = CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4),
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer.from_pretrained("tokenizer", model_max_length=16),
        unet=UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 16), norm_num_groups=2, layers_per_block=1,
            cross_attention_dim=32, attention_head_dim=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained("diffusion")  # fmt: skip
    _command("capture", "--model", "diffusion", "--max", "4", "--steps", "2", "--out", "pictures")


def capture_built_in_models() -> None:
    for name in ("llama", "flux", "cogvideo"):
        _command("capture", "--model", name, "--size", "tiny", "--max", "2", "--steps", "1")


def interpret_triton_kernels() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    shape = ("random", "-hq", "2", "-sq", "33", "-d", "32")
    names = "triton-fa2,triton-sage,triton-fp8"
    _command("replay", *shape, "--kernels", names, *_QUICK)
    _all_ok(set(names.split(",")))


_QUICK = ("--rounds", "2", "--max-seconds", "0.05", "--device", "cpu", "--json", "rows.jsonl")

STEPS = {
    function.__name__: function
    for function in (
        record_a_user_model,
        replay_the_recording,
        use_kernel_and_use_plan,
        capture_a_function,
        capture_a_transformers_checkpoint,
        capture_a_diffusers_checkpoint,
        capture_built_in_models,
        interpret_triton_kernels,
    )
}


def _command(*words: str) -> None:
    """Run one of our installed commands; on failure print its last line and exit with its code."""
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        print((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        sys.exit(done.returncode)


def _all_ok(wanted: set[str]) -> None:
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    good = ("ok", "not-timed")  # Triton's interpreter produces outputs but no meaningful times
    wrong = {row["kernel"]: row["reason"] for row in rows if row["status"] not in good}
    assert not wrong, wrong
    assert wanted <= {row["kernel"] for row in rows}


if __name__ == "__main__":
    try:
        STEPS[sys.argv[1]]()
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed")
        sys.exit(2)
