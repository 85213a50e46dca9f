"""The command line shared by the three scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[2]


def parse(name: str, description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Parse a script's arguments, create the directory to write to, and seed PyTorch."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.training.{name}", description=description
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, help="for weights and card (default models/pretrained)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--library", type=Path, help="another Python's lib/python3.x (llama)")
    parser.add_argument("--smoke", action="store_true", help="a few steps on small data")
    given = parser.parse_args(arguments)
    # The output of a smoke run must not be mistaken for real weights.
    where = "benchmarks/training/runs" if given.smoke else "models/pretrained"
    given.out = given.out or ROOT / where / name
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()  # only our own progress bar is shown
        library.set_verbosity_error()
    return given
